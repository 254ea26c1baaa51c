"""Messages of protobuf from a table, without generated code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_KINDS: Final = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "bool": _KINDS.TYPE_BOOL,
    "int64": _KINDS.TYPE_INT64,
    "string": _KINDS.TYPE_STRING,
    "uint64": _KINDS.TYPE_UINT64,
}


def messages(schema: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Class of each message. `schema`: fields by message, each "<number> <name> <type>", with `*` for repeated."""
    file = descriptor_pb2.FileDescriptorProto(name="table.proto", package="table", syntax="proto3")
    for name, fields in schema.items():
        message = file.message_type.add(name=name)
        for number, field_name, kind in (line.split() for line in fields):
            made = message.field.add(name=field_name, number=int(number), label=_KINDS.LABEL_OPTIONAL)
            if kind.startswith("*"):
                made.label = _KINDS.LABEL_REPEATED
            if scalar := _SCALARS.get(kind.lstrip("*")):
                made.type = scalar
            else:
                made.type, made.type_name = _KINDS.TYPE_MESSAGE, ".table." + kind.lstrip("*")
    # Its own pool: other tables have messages of the same names.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"table.{name}")) for name in schema}
