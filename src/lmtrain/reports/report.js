"use strict";
// Draws the curves for the stretch that is zoomed to, as smooth and by the axes that are chosen.
const read = id => JSON.parse(document.getElementById(id).textContent), curves = read("curves"), clocks = read("clocks");
const find = id => document.getElementById(id), L = 62, R = 24, T = 10, B = 42;

function smoothed(y, weight) {  // exponential moving average, its start corrected as in Adam
  let mean = 0, seen = 0;
  return y.map(v => { mean = weight * mean + (1 - weight) * v; seen = weight * seen + 1 - weight; return mean / seen; });
}
function ticks(low, high, number) {
  const rough = (high - low) / number || 1, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(m => m * size).find(s => s >= rough), found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) found.push(v);
  return found;
}
function round_ends(low, high, number) {  // the ticks around the values, so that an axis ends with numbers
  const [first, second] = ticks(low, high, number), step = second - first || high - low;
  return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
}
function words(v) {
  const a = Math.abs(v);
  if (a >= 1e9) return +(v / 1e9).toPrecision(4) + " G";
  if (a >= 1e6) return +(v / 1e6).toPrecision(4) + " M";
  if (a >= 1e5) return +(v / 1e3).toPrecision(4) + " k";
  return a !== 0 && a < 1e-3 ? v.toExponential(2) : String(+v.toPrecision(4));
}
function element(parent, name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  parent.appendChild(made);
  return made;
}
function positions(line, axis) {  // of a line's steps on the chosen axis, between the points that the clock has
  const clock = clocks[line.run];
  if (axis === "step" || !clock || !clock.length) return line.x;
  const column = axis === "tokens" ? 1 : 2;
  let i = 0;
  return line.x.map(x => {
    while (i < clock.length - 2 && clock[i + 1][0] < x) i++;
    const a = clock[i], b = clock[Math.min(i + 1, clock.length - 1)];
    return b[0] === a[0] ? a[column] : a[column] + (x - a[0]) / (b[0] - a[0]) * (b[column] - a[column]);
  });
}
function range_of(values, whole) {  // lowest and highest; a few far above or below the rest are cut off
  const sorted = [...values].sort((a, b) => a - b), at = share => sorted[Math.round(share * (sorted.length - 1))];
  let low = sorted[0], high = sorted.at(-1);
  if (!whole && sorted.length > 8) {
    const room = 1.5 * (at(.95) - at(.05));
    if (room > 0) { low = Math.max(low, at(.05) - room); high = Math.min(high, at(.95) + room); }
  }
  return sorted.length ? [low, high] : [0, 1];
}

function chart(figure) {
  const svg = figure.querySelector("svg[role]"), tip = figure.querySelector(".tip"), lines = curves[figure.dataset.chart];
  let range = null, from = null, before = "step", W, H, X, toX;

  function draw() {
    const weight = Number(find("smoothing").value), axis = find("axis")?.value ?? "step";
    if (axis !== before) { range = null; before = axis; }
    W = Math.max(300, svg.clientWidth || 600);
    H = figure.classList.contains("large") ? Math.max(260, Math.min(440, W * .4)) : 260;
    svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
    const xs = lines.map(line => positions(line, axis)), every = xs.flat();
    const all = [every.reduce((a, b) => Math.min(a, b), Infinity), every.reduce((a, b) => Math.max(a, b), -Infinity)];
    if (all[0] === all[1]) all[1] += 1;
    const [left, right] = range ?? all, inside = x => x >= left && x <= right, shown = [];
    lines.forEach((line, i) => {
      const y = weight > 0 && line.y.length > 20 ? smoothed(line.y, weight) : line.y;
      if (y !== line.y) shown.push({ line, x: xs[i], y: line.y, raw: true });
      shown.push({ line, x: xs[i], y, raw: false });
    });
    const values = shown.flatMap(s => s.y.filter((_, i) => inside(s.x[i])));
    const log = find("log").checked && values.every(v => v > 0), scale = log ? Math.log10 : v => v;
    let [low, high] = range_of(values.map(scale), find("whole").checked);
    if (low === 0 && high === 0) high = 1;
    if (low === high) { low -= Math.abs(low) * .1 || 1; high += Math.abs(high) * .1 || 1; }
    [low, high] = round_ends(low, high, 7);
    X = x => L + (x - left) / (right - left) * (W - L - R);
    toX = p => left + (p - L) / (W - L - R) * (right - left);
    const Y = v => H - B - (scale(v) - low) / (high - low) * (H - T - B);
    svg.replaceChildren();
    const room = 5;  // a dot at an end of an axis is whole
    const box = { x: L - room, y: T - room, width: W - L - R + 2 * room, height: H - T - B + 2 * room };
    const area = element(svg, "svg", { ...box, viewBox: Object.values(box).join(" ") });
    for (const t of ticks(low, high, 7)) {
      const v = log ? 10 ** t : t;
      element(area, "line", { class: "grid", x1: L, x2: W - R, y1: Y(v), y2: Y(v) });
      element(svg, "text", { x: L - 6, y: Y(v) + 4, "text-anchor": "end" }, words(v));
    }
    const inner = ticks(left, right, W / 70).filter(v => Math.min(X(v) - L, W - R - X(v)) > 40);
    for (const v of [left, ...inner, right]) if (axis !== "step" || Number.isInteger(v) || range)
      element(svg, "text", { class: "x", x: X(v), y: H - 24, "text-anchor": "middle" },
        words(axis === "step" ? Math.round(v) : v));
    element(svg, "text", { class: "axis", x: (L + W - R) / 2, y: H - 6, "text-anchor": "middle" }, axis);
    element(svg, "text", { class: "axis", transform: `translate(13 ${(T + H - B) / 2}) rotate(-90)`,
      "text-anchor": "middle" }, figure.dataset.axis);
    for (const s of shown) {
      let d = "";
      s.x.forEach((x, i) => { if (inside(x)) d += (d ? "L" : "M") + X(x).toFixed(1) + " " + Y(s.y[i]).toFixed(1); });
      if (s.x.length === 1) d += "h.1";
      const look = `var(--c${s.line.colour})`;
      element(area, "path", { d, class: s.raw ? "raw" : s.line.pale ? "pale" : "", stroke: look, "stroke-dasharray": s.line.dash,
        "stroke-width": s.line.val ? 2.4 : 1.5 });
      if (s.line.val && !s.raw && s.x.length <= 60)
        s.x.forEach((x, i) => { if (inside(x)) element(area, "circle", { cx: X(x), cy: Y(s.y[i]), r: 3, fill: look }); });
    }
    const above = values.filter(v => scale(v) > high).length, below = values.filter(v => scale(v) < low).length;
    const cut = [above && `${above} above`, below && `${below} below`].filter(Boolean).join(", ");
    if (cut) element(svg, "text", { class: "axis", x: W - R, y: T + 12, "text-anchor": "end" }, `${cut} not shown`);
    svg.shown = shown.filter(s => !s.raw);
  }
  function place(event) {
    const box = svg.getBoundingClientRect();
    return Math.min(W - R, Math.max(L, (event.clientX - box.left) / box.width * W));
  }
  function look(event) {
    const p = place(event), x = toX(p);
    svg.querySelectorAll(".hover, .zoom").forEach(e => e.remove());
    if (from !== null) element(svg, "rect", { class: "zoom", x: Math.min(from, p), y: T, width: Math.abs(p - from),
      height: H - T - B });
    element(svg, "line", { class: "hover", x1: p, x2: p, y1: T, y2: H - B });
    tip.textContent = svg.shown.map(s => {
      let best = 0;
      s.x.forEach((v, i) => { if (Math.abs(v - x) < Math.abs(s.x[best] - x)) best = i; });
      return `${s.line.name} ${words(s.y[best])} (step ${s.line.x[best]})`;
    }).join(", ");
  }
  svg.addEventListener("pointermove", look);
  svg.addEventListener("pointerdown", event => { if (event.pointerType === "mouse") from = place(event); });
  svg.addEventListener("pointerup", event => {
    const to = place(event);
    if (from !== null && Math.abs(to - from) > 8) range = [toX(Math.min(from, to)), toX(Math.max(from, to))];
    from = null;
    draw();
  });
  svg.addEventListener("pointerleave", () => { from = null; tip.textContent = ""; draw(); });
  svg.addEventListener("dblclick", () => { range = null; draw(); });
  for (const id of ["smoothing", "axis", "log", "whole"]) find(id)?.addEventListener("input", draw);
  new ResizeObserver(() => { if (svg.clientWidth && Math.abs(svg.clientWidth - W) > 1) draw(); }).observe(figure);
  draw();
}
document.querySelectorAll("figure[data-chart]").forEach(chart);
