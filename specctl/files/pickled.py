"""What a pickle of `torch.save` describes, found without unpickling. Knows opcodes, not files.

The opcodes are interpreted on plain values: a global is a name that must be on a list and is never
imported, a call is a table lookup, and what torch does not write is refused before its argument is
decoded. Source: `torch/_weights_only_unpickler.py` (the same idea, which still imports and calls).
"""

from __future__ import annotations

import io
import pickletools
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final, TypeAlias

from specctl.errors import InputError, UnsafeFile
from specctl.files.regular import shown
from specctl.files.torchcalls import NAMES, OPAQUE, Name, Stored, called, storage

MAX_OPCODES: Final = 2_000_000
"""40 per tensor: 50 000 tensors."""

_OPCODES: Final = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
_CODE: Final = frozenset(("INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID"))
_KEYS: Final = (str, int, float, type(None))
_LINE: Final = 1000
_HINT: Final = "do not load this file; ask for the weights as safetensors"


@dataclass(slots=True)
class _Machine:
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    """A dict and no list: an index of 2^31 costs one entry here."""

    def since_mark(self) -> list[Any]:
        at = self.marks.pop()
        values = self.stack[at:]
        del self.stack[at:]
        return values


_Step: TypeAlias = Callable[[_Machine, Any], None]


class _Refused(Exception):
    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class _RunsCode(_Refused):
    def __init__(self, what: str) -> None:
        super().__init__(f"loading it would run code: the pickle {what}")


def evaluate(data: bytes, where: str) -> Any:
    """What the pickle describes: dicts, lists, tuples, numbers, strings, Stored, Name and Opaque.

    Raises UnsafeFile for what would run code, InputError for what torch does not write. Lists and dicts may
    contain themselves: never walk the result without a bound.
    """
    machine = _Machine()
    try:
        for name, argument in _operations(data):
            if name == "STOP":
                return machine.stack.pop()
            _STEPS[name](machine, argument)
    except _RunsCode as refused:
        raise UnsafeFile(refused.what, where=where, hint=_HINT) from None
    except _Refused as refused:
        raise InputError(refused.what, where=where) from None
    except (ValueError, LookupError, TypeError, OverflowError, struct.error) as error:
        raise InputError(f"the pickle is damaged: {shown(str(error)) or type(error).__name__}", where=where) from None
    raise InputError("the pickle is cut: it has no end", where=where)


def _operations(data: bytes) -> Iterator[tuple[str, Any]]:
    """The opcodes and their arguments. `pickletools.genops` would also decode arguments of what is refused."""
    stream = io.BytesIO(data)
    for _ in range(MAX_OPCODES):
        code = stream.read(1)
        if not code:
            return
        opcode = _OPCODES.get(code)
        if opcode is None or (opcode.name not in _STEPS and opcode.name != "STOP"):
            _refuse(opcode.name if opcode else f"{code[0]:#04x}", stream)
        elif opcode.name == "GLOBAL":
            yield "GLOBAL", (_line(stream), _line(stream))
        else:
            yield opcode.name, opcode.arg.reader(stream) if opcode.arg else None
    raise _Refused(f"the pickle has more than {MAX_OPCODES} opcodes")


def _refuse(name: str, stream: BinaryIO) -> None:
    if name == "INST":
        raise _RunsCode(f"names `{shown('.'.join((_line(stream), _line(stream))))}`")
    if name in _CODE:
        raise _RunsCode(f"builds an object with the opcode {name}")
    raise _Refused(f"the pickle holds the opcode {name}, which torch does not write")


def _line(stream: BinaryIO) -> str:
    """Ours, because pickletools' reader interprets escapes and warns about those that it does not know."""
    line = stream.readline(_LINE)
    if not line.endswith(b"\n"):
        raise ValueError("a name has no end")
    return line[:-1].decode("utf-8")


def _push(machine: _Machine, value: Any) -> None:
    machine.stack.append(value)


def _text(machine: _Machine, value: str) -> None:
    # Raises ValueError for half a surrogate pair, which could be neither shown nor written afterwards.
    value.encode()
    machine.stack.append(value)


def _pushes(value: Any) -> _Step:
    return lambda machine, _: machine.stack.append(value)


def _ignore(_machine: _Machine, _: Any) -> None:
    """Protocol and frames: every opcode is looked at, whatever they say."""


def _mark(machine: _Machine, _: Any) -> None:
    machine.marks.append(len(machine.stack))


def _long(machine: _Machine, value: int) -> None:
    # Larger ones are no sizes, and slow to print or multiply.
    machine.stack.append(value if value.bit_length() < 64 else OPAQUE)


def _tuple(machine: _Machine, _: Any) -> None:
    values = machine.since_mark()
    machine.stack.append(tuple(values))


def _tuple_of(count: int) -> _Step:
    def step(machine: _Machine, _: Any) -> None:
        values = [machine.stack.pop() for _ in range(count)]
        machine.stack.append(tuple(reversed(values)))

    return step


def _append(machine: _Machine, _: Any) -> None:
    _extend(machine, [machine.stack.pop()])


def _appends(machine: _Machine, _: Any) -> None:
    _extend(machine, machine.since_mark())


def _extend(machine: _Machine, values: list[Any]) -> None:
    if not isinstance(machine.stack[-1], list):
        raise _Refused("the pickle appends to something that is no list")
    machine.stack[-1].extend(values)


def _set_item(machine: _Machine, _: Any) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _update(machine, [key, value])


def _set_items(machine: _Machine, _: Any) -> None:
    _update(machine, machine.since_mark())


def _update(machine: _Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if not isinstance(target, dict) or len(items) % 2:
        raise _Refused("the pickle sets items of something that is no dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        # Only these: the hash of pairs of pairs of pairs, 60 levels deep, never ends.
        if isinstance(key, _KEYS):
            target[key] = value


def _add_items(machine: _Machine, _: Any) -> None:
    machine.since_mark()


def _put(machine: _Machine, index: int) -> None:
    machine.memo[index] = machine.stack[-1]


def _memoize(machine: _Machine, _: Any) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _get(machine: _Machine, index: int) -> None:
    machine.stack.append(machine.memo[index])


def _global(machine: _Machine, names: tuple[str, str]) -> None:
    text = " ".join(names)
    if text not in NAMES:
        raise _RunsCode(f"names `{shown('.'.join(names))}`")
    machine.stack.append(Name(text))


def _stack_global(machine: _Machine, _: Any) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise _RunsCode("computes the name of a global")
    _global(machine, (module, name))


def _reduce(machine: _Machine, _: Any) -> None:
    arguments, function = machine.stack.pop(), machine.stack.pop()
    if not isinstance(function, Name) or not isinstance(arguments, tuple):
        raise _RunsCode("calls something that is no name")
    machine.stack.append(called(function, arguments))


def _build(machine: _Machine, _: Any) -> None:
    machine.stack.pop()
    # `_metadata` of a state dict, attributes of a parameter: not read, so set on nothing.
    if not isinstance(machine.stack[-1], dict | Stored):
        raise _RunsCode("sets the state of an object")


def _persistent(machine: _Machine, _: Any) -> None:
    machine.stack.append(storage(machine.stack.pop()))


_STEPS: Final[Mapping[str, _Step]] = {
    **dict.fromkeys(("PROTO", "FRAME"), _ignore),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "BINFLOAT"), _push),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINSTRING", "SHORT_BINSTRING"), _text),
    **dict.fromkeys(("LONG1", "LONG4"), _long),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "EMPTY_SET"), _pushes(OPAQUE)),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _get),
    **{f"TUPLE{count}": _tuple_of(count) for count in (1, 2, 3)},
    "NONE": _pushes(None),
    "NEWTRUE": _pushes(True),
    "NEWFALSE": _pushes(False),
    "MARK": _mark,
    "EMPTY_TUPLE": _pushes(()),
    "TUPLE": _tuple,
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "APPEND": _append,
    "APPENDS": _appends,
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "ADDITEMS": _add_items,
    "MEMOIZE": _memoize,
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "BUILD": _build,
    "BINPERSID": _persistent,
}
"""All that torch writes at any protocol. What is not here is refused."""
