"use strict";
// Draws the curves again for what is zoomed to and how much is smoothed: drag to zoom, double click for all of it.
const curves = JSON.parse(document.getElementById("curves").textContent);
const W = 600, H = 260, L = 70, R = 22, T = 10, B = 42;  // as in report_page.py
const slider = document.getElementById("smoothing");

function smoothed(y, weight) {  // exponential moving average, its start corrected as in Adam
  let mean = 0, seen = 0;
  return y.map(v => { mean = weight * mean + (1 - weight) * v; seen = weight * seen + 1 - weight; return mean / seen; });
}
function ticks(low, high, number) {
  const rough = (high - low) / number || 1, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(m => m * size).find(s => s >= rough), found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) found.push(v);
  return found;
}
function words(v) {
  const a = Math.abs(v);
  if (a >= 1e9) return +(v / 1e9).toPrecision(4) + " G";
  if (a >= 1e6) return +(v / 1e6).toPrecision(4) + " M";
  if (a >= 1e5) return +(v / 1e3).toPrecision(4) + " k";
  return a !== 0 && a < 1e-3 ? v.toExponential(2) : String(+v.toPrecision(5));
}
function element(parent, name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  parent.appendChild(made);
  return made;
}

function chart(figure) {
  const svg = figure.querySelector("svg[role]"), tip = figure.querySelector(".tip"), lines = curves[figure.dataset.chart];
  const every = lines.flatMap(l => l.x), all = [every.reduce((a, b) => Math.min(a, b), Infinity),
    every.reduce((a, b) => Math.max(a, b), -Infinity)];
  if (all[0] === all[1]) all[1] += 1;
  let range = all, from = null, X, toX;

  function draw() {
    const weight = Number(slider.value), shown = [];
    for (const line of lines) {
      const y = weight > 0 && line.y.length > 20 ? smoothed(line.y, weight) : line.y;
      if (y !== line.y) shown.push({ line, y: line.y, raw: true });
      shown.push({ line, y, raw: false });
    }
    let low = Infinity, high = -Infinity;
    for (const s of shown) s.line.x.forEach((x, i) => {
      if (x >= range[0] && x <= range[1]) { low = Math.min(low, s.y[i]); high = Math.max(high, s.y[i]); }
    });
    if (!(low <= high)) { low = 0; high = 1; }
    if (low === high) { low -= Math.abs(low) * .1 || 1; high += Math.abs(high) * .1 || 1; }
    const pad = (high - low) * .04;
    low -= pad; high += pad;
    X = x => L + (x - range[0]) / (range[1] - range[0]) * (W - L - R);
    toX = p => range[0] + (p - L) / (W - L - R) * (range[1] - range[0]);
    const Y = y => H - B - (y - low) / (high - low) * (H - T - B);
    svg.replaceChildren();
    for (const v of ticks(low, high, 5)) {
      element(svg, "line", { class: "grid", x1: L, x2: W - R, y1: Y(v), y2: Y(v) });
      element(svg, "text", { x: L - 6, y: Y(v) + 4, "text-anchor": "end" }, words(v));
    }
    for (const v of ticks(range[0], range[1], 6)) if (Number.isInteger(v))
      element(svg, "text", { x: X(v), y: H - 24, "text-anchor": "middle" }, words(v));
    element(svg, "text", { class: "axis", x: (L + W - R) / 2, y: H - 6, "text-anchor": "middle" }, "step");
    element(svg, "text", { class: "axis", transform: `translate(13 ${(T + H - B) / 2}) rotate(-90)`,
      "text-anchor": "middle" }, figure.dataset.axis);
    for (const s of shown) {
      let d = "";
      s.line.x.forEach((x, i) => {
        if (x >= range[0] && x <= range[1]) d += (d ? "L" : "M") + X(x).toFixed(1) + " " + Y(s.y[i]).toFixed(1);
      });
      if (s.line.x.length === 1) d += "h.1";
      element(svg, "path", { d, class: s.raw ? "raw" : "", stroke: `var(--c${s.line.colour})`,
        "stroke-dasharray": s.line.dash, "stroke-width": s.line.val ? 2.4 : 1.5 });
      if (s.line.val && !s.raw && s.line.x.length <= 60) s.line.x.forEach((x, i) => {
        if (x >= range[0] && x <= range[1]) element(svg, "circle", { cx: X(x), cy: Y(s.y[i]), r: 3,
          fill: `var(--c${s.line.colour})` });
      });
    }
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
    const said = svg.shown.map(s => {
      let best = 0;
      s.line.x.forEach((v, i) => { if (Math.abs(v - x) < Math.abs(s.line.x[best] - x)) best = i; });
      return `${s.line.name} ${words(s.y[best])} (step ${s.line.x[best]})`;
    });
    tip.textContent = said.join(", ");
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
  svg.addEventListener("dblclick", () => { range = all; draw(); });
  slider.addEventListener("input", draw);
  draw();
}
document.querySelectorAll("figure[data-chart]").forEach(chart);
