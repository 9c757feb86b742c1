"""Writes docs/api.md from the comments of the public protos. Run it after a change to them.

python docs/generate_api.py            writes the page
python docs/generate_api.py --check    exit status 1 if the page is not what it would write
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
PROTOS = ("tidegate/inference/v1/inference.proto", "tidegate/admin/v1/admin.proto")
_SCALARS = {
    value: name.removeprefix("TYPE_").lower() for name, value in FieldDescriptorProto.Type.items()
}  # such as uint32

# Numbers of fields in the descriptors, of which paths to comments are made.
_MESSAGE, _ENUM, _SERVICE = 4, 5, 6  # FileDescriptorProto
_MEMBER = 2  # fields of a message, values of an enum, methods of a service
_ONEOF = 8  # DescriptorProto

Comments = dict[tuple[int, ...], str]


def page() -> str:
    """The whole page, in Markdown."""
    lines = [
        "# API",
        "",
        "Written by `python docs/generate_api.py` from the comments in `protos/`; change those.",
    ]
    for file in _files():
        lines += ["", f"## {file.package}", ""]
        lines += _file_lines(file)
    return "\n".join(lines) + "\n"


def _files() -> list[FileDescriptorProto]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "set"
        include = files("grpc_tools") / "_proto"
        arguments = ["protoc", f"-I{ROOT / 'protos'}", f"-I{include}", "--include_source_info"]
        if protoc.main([*arguments, f"--descriptor_set_out={output}", *PROTOS]):
            raise SystemExit("protoc failed")
        return list(FileDescriptorSet.FromString(output.read_bytes()).file)


def _file_lines(file: FileDescriptorProto) -> Iterator[str]:
    comments = {
        tuple(location.path): _paragraphs(location.leading_comments)
        for location in file.source_code_info.location
    }
    for i, service in enumerate(file.service):
        yield from _service_lines(service, comments, (_SERVICE, i))
    for i, message in enumerate(file.message_type):
        yield from _message_lines(message, comments, (_MESSAGE, i))
    for i, enum in enumerate(file.enum_type):
        yield from _enum_lines(enum, comments, (_ENUM, i))


def _service_lines(
    service: ServiceDescriptorProto, comments: Comments, path: tuple[int, ...]
) -> Iterator[str]:
    yield from (f"### {service.name}", "", comments[path], "")
    for i, method in enumerate(service.method):
        stream = "stream of " if method.server_streaming else ""
        request, response = _link(method.input_type), _link(method.output_type)
        yield from (f"#### {service.name}.{method.name}", "")
        yield from (f"Takes {request}, returns {stream}{response}.", "")
        yield from (comments[*path, _MEMBER, i], "")


def _message_lines(message: DescriptorProto, comments: Comments, path: tuple[int, ...]) -> Iterator[str]:
    yield from (f"### {message.name}", "", comments[path], "")
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    if message.field:
        yield from ("| field | type | |", "| --- | --- | --- |")
    for i, field in enumerate(message.field):
        text = comments[*path, _MEMBER, i]
        if field.HasField("oneof_index") and not field.proto3_optional:
            text = f"*One of `{message.oneof_decl[field.oneof_index].name}`.* {text}"
        yield f"| `{field.name}` | {_type(field, maps)} | {_cell(text)} |"
    if message.field:
        yield ""
    for i, group in enumerate(message.oneof_decl):
        if (*path, _ONEOF, i) in comments and not group.name.startswith("_"):
            yield from (f"`{group.name}`: {comments[*path, _ONEOF, i]}", "")


def _enum_lines(enum: EnumDescriptorProto, comments: Comments, path: tuple[int, ...]) -> Iterator[str]:
    yield from (f"### {enum.name}", "", comments[path], "", "| value | number | |", "| --- | --- | --- |")
    for i, value in enumerate(enum.value):
        yield f"| `{value.name}` | {value.number} | {_cell(comments[*path, _MEMBER, i])} |"
    yield ""


def _type(field: FieldDescriptorProto, maps: dict[str, Any]) -> str:
    name = field.type_name.rpartition(".")[2]
    if name in maps:
        key, value = maps[name].field
        return f"map of {_type(key, {})} to {_type(value, {})}"
    kind = _link(field.type_name) if field.type_name else _SCALARS[field.type]
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {kind}"
    return f"optional {kind}" if field.proto3_optional else kind


def _link(type_name: str) -> str:
    name = type_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})" if type_name.startswith(".tidegate.") else type_name.lstrip(".")


def _paragraphs(comment: str) -> str:
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in comment.split("\n\n"))


def _cell(text: str) -> str:
    return text.replace("\n\n", " ").replace("|", "\\|")


def main(arguments: Sequence[str]) -> int:
    """Write or check the page; the exit status."""
    text = page()
    if "--check" in arguments:
        return 0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
