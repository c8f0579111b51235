"""Lets the tests in one process use what an answer defines in another: the words that both processes of rewards/code.py
exchange. Runs without lmtrain and without site packages.

Plain values are copied, so that the tests compare them in their own process, where no code of the answer runs. All else
stays where it is, and the other process has a `Proxy` of it, whose attributes, calls and operators are requests. In the
tests a proxy is never equal to a plain value, nor less or greater, because the answer's `__eq__` would see the expected
value and could always agree; nor is what was computed from a proxy and a plain value ever a number.
"""

import contextlib
import importlib
import io
import json
import operator
import sys
import threading
from typing import Any

_SIMPLE = (type(None), bool, int, float, str)
_ITEMS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "collections.deque": None}
_PAIRS = {"dict": dict, "collections.OrderedDict": None, "collections.Counter": None, "collections.defaultdict": None}
_VALUES = (int, float, str, bytes, tuple, frozenset)
# How values of the standard library are taken apart; they are built again from these arguments.
_PARTS = {
    "bytes": lambda v: [list(v)],
    "bytearray": lambda v: [list(v)],
    "complex": lambda v: [v.real, v.imag],
    "range": lambda v: [v.start, v.stop, v.step],
    "slice": lambda v: [v.start, v.stop, v.step],
    "fractions.Fraction": lambda v: [v.numerator, v.denominator],
    "decimal.Decimal": lambda v: [str(v)],
    "datetime.date": lambda v: [v.year, v.month, v.day],
    "datetime.timedelta": lambda v: [v.days, v.seconds, v.microseconds],
    "datetime.datetime.fromisoformat": lambda v: [v.isoformat()],
    "datetime.time.fromisoformat": lambda v: [v.isoformat()],
}
_CHANGING = {
    list: "append extend insert pop remove clear sort reverse __setitem__ __delitem__ __iadd__",
    dict: "update setdefault pop popitem clear __setitem__ __delitem__ __ior__",
    set: "add discard remove pop clear update difference_update intersection_update symmetric_difference_update",
}
_HARMLESS = ("__name__", "__qualname__", "__doc__", "__module__")
_MUTABLE = (list, dict, set, bytearray)
_FUNCTIONS = {
    "__iter__": iter, "__next__": next, "__len__": len, "__str__": str, "__repr__": repr, "__bool__": bool,
    "__hash__": hash, "__int__": int, "__float__": float, "__complex__": complex, "__index__": operator.index,
    "__abs__": abs, "__round__": round, "__neg__": operator.neg, "__pos__": operator.pos, "__dir__": dir,
    "__invert__": operator.invert, "__getitem__": operator.getitem, "__setitem__": operator.setitem,
    "__delitem__": operator.delitem, "__contains__": operator.contains, "__format__": format,
    "__reversed__": reversed, "__instancecheck__": lambda cls, one: isinstance(one, cls),
    "__subclasscheck__": lambda cls, one: issubclass(one, cls), "__enter__": lambda one: type(one).__enter__(one),
    "__exit__": lambda one, *error: type(one).__exit__(one, *error),
}  # fmt: skip
_COMPARISONS = ["__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"]
_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor"
_ARITHMETIC = [f"__{side}{name}__" for name in _BINARY.split() for side in ("", "r")]
_ARITHMETIC += ["__neg__", "__pos__", "__invert__"]
_NUMBERS = ["__abs__", "__round__", "__int__", "__float__", "__complex__", "__index__", "__bool__"]
_ALL = dict.fromkeys([*_FUNCTIONS, *_COMPARISONS, *_ARITHMETIC])


def _named(name: str) -> Any:
    """Returns what `module.attribute` or a builtin's name stands for in the standard library."""
    module, _, rest = name.partition(".") if "." in name else ("builtins", "", name)
    return operator.attrgetter(rest)(importlib.import_module(module))


def _name_of(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


class Proxy:
    """An object of the other process.

    Attributes:
        base: list, dict or set, if its class is derived from one; then its content can be compared with plain values.
        derived: whether it was computed from a plain value of the tests.
    """

    __slots__ = ("_lmtrain_base", "_lmtrain_derived", "_lmtrain_number", "_lmtrain_peer")

    def __init__(self, peer: "Peer", number: int, base: type | None = None, derived: bool = False) -> None:
        for name, value in {"base": base, "derived": derived, "number": number, "peer": peer}.items():
            object.__setattr__(self, f"_lmtrain_{name}", value)

    def __getattribute__(self, name: str) -> Any:
        if name in Proxy.__slots__:
            return object.__getattribute__(self, name)
        if name == "__class__" and self._lmtrain_base is not None:  # for isinstance
            return self._lmtrain_base
        return self._lmtrain_peer.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._lmtrain_peer.ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._lmtrain_peer.ask("delete", self, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._lmtrain_peer.ask("call", self, *arguments, **named)

    def __contains__(self, item: Any) -> bool:
        try:
            found = iter(self)
        except TypeError:
            return bool(self._lmtrain_peer.ask("special", self, "__contains__", item))
        return any(item == each for each in found)


def _special(name: str) -> Any:
    def forward(self: Proxy, *operands: Any) -> Any:
        peer = self._lmtrain_peer
        if peer.namespace is not None:  # the answer may do with objects of the tests what it likes
            return peer.ask("special", self, name, *operands)
        derived = self._lmtrain_derived or not all(type(one) is Proxy and not one._lmtrain_derived for one in operands)
        if name in _COMPARISONS and not all(type(one) is Proxy for one in operands):
            base: Any = self._lmtrain_base
            return NotImplemented if base is None else getattr(base, name)(peer.ask("content", self), *operands)
        if self._lmtrain_derived and name in _NUMBERS:
            raise TypeError(f"{name}: the answer was told a value of the tests, which this number may repeat")
        found = peer.ask("special", self, name, *operands)
        if not derived or name not in _ARITHMETIC or found is NotImplemented:
            return found
        if type(found) is not Proxy:
            raise TypeError(f"{name}: the answer was told a value of the tests, which this number may repeat")
        return Proxy(peer, found._lmtrain_number, found._lmtrain_base, derived=True)

    return forward


for _name in _ALL:
    if _name != "__contains__":
        setattr(Proxy, _name, _special(_name))


class Peer:
    """One end of the wire, along which both sides ask, and answer while they wait."""

    def __init__(self, wire: Any, namespace: dict[str, Any] | None = None) -> None:
        """namespace: the names that the answer has defined; None: this is the process of the tests."""
        self.wire, self.namespace = wire, namespace
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}  # position in `objects` by id
        self.known: dict[int, Any] = {}  # proxies and exception classes by number
        self.lock = threading.RLock()

    def send(self, message: Any) -> None:
        self.wire.write(json.dumps(message).encode() + b"\n")
        self.wire.flush()

    def receive(self) -> Any:
        line = self.wire.readline()
        if not line:
            raise SystemExit(1)  # the other process has ended
        return json.loads(line)

    def ask(self, task: str, *operands: Any, **named: Any) -> Any:
        """Has the other process do something and returns what came of it; operands that it changed are changed here."""
        with self.lock:
            packed = [self.pack(one) for one in operands], {name: self.pack(one) for name, one in named.items()}
            self.send(["ask", task, *packed])
            while (reply := self.receive())[0] == "ask":
                self.answer(*reply[1:])
        if reply[0] == "raised":
            raise self.error(*reply[1:])
        for place, value in reply[2]:
            _replace(operands[place] if isinstance(place, int) else named[place], self.unpack(value))
        if reply[3]:
            sys.stdout.write(reply[3])
        return self.unpack(reply[1])

    def answer(self, task: str, packed: list[Any], packed_named: dict[str, Any]) -> None:
        """Does what the other process asks for, and sends what came of it."""
        printed = io.StringIO()
        try:
            operands = [self.unpack(one) for one in packed]
            named = {name: self.unpack(one) for name, one in packed_named.items()}
            with contextlib.redirect_stdout(printed) if self.namespace is not None else contextlib.nullcontext():
                value = self.do(task, *operands, **named)
            # A list that is an attribute or an item is the answer's: what the tests append to it has to arrive there.
            held = task in ("get", "name") or (task == "special" and operands[1] == "__getitem__")
            changed: list[Any] = [*enumerate(operands), *named.items()]
            was: dict[Any, Any] = dict(enumerate(packed)) | packed_named
            changed = [(place, self.pack(one)) for place, one in changed if issubclass(type(one), _MUTABLE)]
            changed = [(place, now) for place, now in changed if now != was[place]]
            reply = ["gave", self.held(value) if held else self.pack(value), changed, printed.getvalue()]
            text = json.dumps(reply)
        except BaseException as error:
            arguments = [one if type(one) in _SIMPLE else str(one) for one in error.args]
            text = json.dumps(["raised", self.pack(type(error)), arguments, self.reference(error)])
        self.wire.write(text.encode() + b"\n")
        self.wire.flush()

    def do(self, task: str, target: Any, *operands: Any, **named: Any) -> Any:
        if self.namespace is None:
            _check_allowed(task, target, operands)
        if task == "name":
            return self.namespace[target]  # type: ignore[index]
        if task == "define":
            assert self.namespace is not None
            self.namespace[target] = operands[0]
            return None
        if task == "content":
            return next(base for base in _MUTABLE if isinstance(target, base))(target)
        if task == "await":
            import asyncio

            return asyncio.run(target)
        if task == "special":
            name, *rest = operands
            if name not in _ALL:
                raise PermissionError(name)
            if name in _FUNCTIONS:
                return _FUNCTIONS[name](target, *rest)  # type: ignore[operator]
            method = getattr(type(target), name, None)
            return NotImplemented if method is None else method(target, *rest)
        functions: dict[str, Any] = {"get": getattr, "set": setattr, "delete": delattr}
        return functions[task](target, *operands) if task in functions else target(*operands, **named)

    def pack(self, value: Any) -> Any:
        """Returns a value as JSON holds it: plain values as they are or [name, parts], others by their number."""
        # Plain values are copied.
        kind = type(value)
        if kind in _SIMPLE:
            return value
        if value is NotImplemented:
            return ["NotImplemented"]
        if kind is Proxy:
            return ["yours", value._lmtrain_number] if value._lmtrain_peer is self else self.reference(value)
        named = getattr(value, "__dict__", {}) if isinstance(value, (*_VALUES, *_CHANGING)) else {}
        if "_lmtrain_number" in named:
            return ["yours", named["_lmtrain_number"]]
        # Containers and values of the standard library are taken apart.
        name = _name_of(kind)
        if name in _ITEMS:
            return [name, [self.pack(one) for one in value]]
        if name in _PAIRS:
            pairs = [[self.pack(key), self.pack(one)] for key, one in value.items()]
            return [name, pairs, self.pack(getattr(value, "default_factory", None))]
        if name in _PARTS:
            return [name, _PARTS[name](value)]
        if f"{name}.fromisoformat" in _PARTS:
            return [f"{name}.fromisoformat", _PARTS[f"{name}.fromisoformat"](value)]
        # The rest stays where it is.
        if isinstance(value, _VALUES):
            return self.like(value)
        return self.standard(value) or self.reference(value)

    def standard(self, value: Any) -> Any:
        """Returns the name of what is the standard library's: of the answer a class that `own` takes; else None."""
        if self.namespace is not None:
            taken = isinstance(value, type) and (value.__module__ == "builtins" or issubclass(value, BaseException))
        else:
            taken = callable(value)
        if not taken:
            return None
        module, name = str(getattr(value, "__module__", None)), str(getattr(value, "__qualname__", ""))
        if module.partition(".")[0] not in sys.stdlib_module_names or module == "__main__":
            return None
        found = getattr(sys.modules.get(module), name, None)
        return ["standard", module, name] if found is value else None

    def like(self, value: Any) -> Any:
        """Packs an object of a class derived from an immutable one: the plain value, and where its attributes are."""
        base = next(base for base in _VALUES if isinstance(value, base))
        return ["like", self.pack(base(value)), self.reference(value)[1]]

    def held(self, value: Any) -> Any:
        """Packs a value so that changes of its lists, dicts and sets are passed on, as `alike` does."""
        kind = type(value)
        if kind not in _CHANGING:
            return self.pack(value)
        pairs = [[self.pack(key), self.held(one)] for key, one in value.items()] if kind is dict else None
        parts = [self.held(one) for one in value] if pairs is None else pairs
        return ["like", [kind.__name__, parts, None], self.reference(value)[1]]

    def reference(self, value: Any) -> Any:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        number = self.numbers[id(value)]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["error", number, value.__name__, [self.pack(base) for base in value.__bases__]]
        base = next((base.__name__ for base in _MUTABLE if isinstance(value, base)), None)
        return ["mine", number, type(value).__name__, base]

    def unpack(self, packed: Any) -> Any:
        if not isinstance(packed, list):
            return packed
        name, *parts = packed
        if name == "NotImplemented":
            return NotImplemented
        if name == "yours":
            return self.objects[parts[0]]
        if name in ("mine", "error", "like"):
            return self.remote(name, *parts)
        if name == "standard":
            return self.own(*parts)
        if name in _ITEMS:
            return _named(name)(self.unpack(one) for one in parts[0])
        if name == "collections.defaultdict":
            return _named(name)(self.unpack(parts[1]), {self.unpack(key): self.unpack(one) for key, one in parts[0]})
        if name in _PAIRS:
            return _named(name)({self.unpack(key): self.unpack(one) for key, one in parts[0]})
        if name in _PARTS:
            return _named(name)(*parts[0])
        raise ValueError(f"no value: {name}")

    def own(self, module: str, name: str) -> Any:
        """Returns a class of the standard library; the tests take only exceptions and builtins from an answer."""
        if self.namespace is not None:
            return getattr(importlib.import_module(module), name)
        found = getattr(sys.modules.get(module), name, None)
        known = module.partition(".")[0] in sys.stdlib_module_names and isinstance(found, type)
        if not known or (module != "builtins" and not issubclass(found, BaseException)):  # type: ignore[arg-type]
            raise TypeError(f"the answer gave {module}.{name}")
        return found

    def remote(self, name: str, *parts: Any) -> Any:
        if name == "like":
            return self.alike(self.unpack(parts[0]), parts[1])
        number, called, base = parts
        if number not in self.known:
            if name == "error":
                bases = tuple(one for one in map(self.unpack, base) if isinstance(one, type))
                self.known[number] = type(called, bases or (Exception,), self.attributes())
            else:
                self.known[number] = Proxy(self, number, {one.__name__: one for one in _MUTABLE}.get(base))
        if called == "coroutine":
            return self.wait(self.known[number])
        return self.known[number]

    def alike(self, value: Any, number: int) -> Any:
        """Returns a value with attributes of an object in the other process, where changes of it arrive as well."""
        base: Any = type(value)
        names = self.attributes() | {name: self.changing(base, name) for name in _CHANGING.get(base, "").split()}
        found = type(base.__name__, (base,), names)(value)
        found._lmtrain_number = number
        return found

    def changing(self, base: type, name: str) -> Any:
        def change(one: Any, *arguments: Any, **named: Any) -> Any:
            there = Proxy(self, one._lmtrain_number)
            self.ask("call", getattr(there, name), *arguments, **named)
            found = getattr(base, name)(one, *arguments, **named)
            return one if name.startswith("__i") else found

        return change

    def attributes(self) -> dict[str, Any]:
        """Returns what makes a class ask for attributes that its objects lack."""

        def get(one: Any, name: str) -> Any:
            if name.startswith("_lmtrain"):
                raise AttributeError(name)
            return self.ask("get", Proxy(self, one._lmtrain_number), name)

        return {"__getattr__": get}

    async def wait(self, coroutine: Proxy) -> Any:
        return self.ask("await", coroutine)

    def error(self, cls: Any, arguments: list[Any], reference: Any) -> BaseException:
        """Returns the exception that the other process has raised, of a class that tests can catch."""
        kind = self.unpack(cls)
        if not isinstance(kind, type) or not issubclass(kind, BaseException):
            return RuntimeError(*arguments)
        error = kind.__new__(kind, *arguments)
        error.args = tuple(arguments)
        with contextlib.suppress(AttributeError):
            error._lmtrain_number = reference[1]  # type: ignore[attr-defined]
        return error


def _replace(old: Any, new: Any) -> None:
    """Gives a list, dict, set or bytearray the content of another. `isinstance` would ask proxies for their class."""
    base: Any = next((base for base in _MUTABLE if issubclass(type(old), base)), None)
    if base in (list, bytearray):
        base.__setitem__(old, slice(None), new)
    elif base is not None:
        base.clear(old)
        base.update(old, new)


def _check_allowed(task: str, target: Any, operands: Any) -> None:
    """Raises AttributeError unless an answer may ask this of an object that the tests gave it.

    It may call it and read its name, but reach nothing behind it, such as the globals of a function. Objects of classes
    of the tests, which are there to be read, have public attributes.
    """
    if task in ("call", "special"):
        return
    name = str(operands[0]) if operands else ""
    own = type(target).__module__ == "__main__" and not name.startswith("_")
    if not (task in ("get", "set") and own) and not (task == "get" and name in _HARMLESS):
        raise AttributeError(f"the answer may not {task} {name} of what the tests gave it")
