"""Edit a compiled OneFlow job (the `_full_job_proto` of an `nn.Graph`) before OneFlow plans it.

`JobEdit` reads the job once and keeps an index of the producers and readers of all values. The time
of a pass is therefore proportional to the number of operations that it visits. Measurements are in
docs/dev/decisions/0013-linear-job-passes.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class JobEdit:
    """An editor for a completed job, with an index of its operations that every edit keeps up to
    date.

    Attributes: ops: name → operation, in the order of the job. Use only the methods to add or
        remove entries. shapes: name of a value (`operation/output_0`) → its description, with shape
        and data type. layouts: the job's tables of layouts. is_on_cpu: True if all operations are
        on CPU.

    Removed operations are deleted from the job itself at the end of the `with` block.
    """

    def __init__(self, job: Any):
        self._job = job
        self.ops = {op.name: op for op in job.net.op}
        self.shapes = job.helper.lbn2logical_blob_desc
        self.layouts = job.job_parallel_view_conf
        self.is_on_cpu = all(
            group.parallel_conf.device_tag == "cpu" for group in job.placement.placement_group
        )
        self._removed: set[str] = set()
        self._mentions: dict[str, set[str]] = {}
        self._readers: dict[str, dict[str, None]] = {}
        for op in self.ops.values():
            self._learn(op)
        self._placement: dict[str, Any] = {}
        for group in job.placement.placement_group:
            for name in group.op_set.op_name:
                self._placement.setdefault(name, group)

    def __enter__(self) -> JobEdit:
        return self

    def __exit__(self, failure: Any, *_: object) -> None:
        if failure is None and self._removed:
            self._take_out()

    def kind(self, op: Any) -> str:
        """Return the type of a model operation, or `variable_conf`, `input_conf`, ... for any other
        operation.
        """
        kind = op.WhichOneof("op_type")
        return op.user_conf.op_type_name if kind == "user_conf" else kind

    def maker(self, value: str) -> Any:
        """Return the operation that makes a value."""
        return self.ops[_maker(value)]

    def dims(self, value: str) -> list[int]:
        """Return the dimensions of a value; an unknown value has none."""
        return list(self.shapes[value].shape.dim) if value in self.shapes else []

    def size(self, value: str) -> int:
        """Return the number of elements of a value."""
        return math.prod(self.dims(value))

    def readers(self, name: str) -> list[Any]:
        """Return the operations that read an output of the operation `name`, or wait for it to
        finish.
        """
        return [self.ops[reader] for reader in self._readers.get(name, ())]

    def redirect(self, old: str, new: str) -> None:
        """Make every model operation that reads the value `old` read `new` instead."""
        for op in self.readers(_maker(old)):
            if op.HasField("user_conf"):
                for sources in op.user_conf.input.values():
                    sources.s[:] = [new if source == old else source for source in sources.s]
                self._learn(op)

    def set_source(self, op: Any, argument: str, index: int, source: str) -> None:
        """Set the `index`-th value of an argument of a model operation to `source`."""
        op.user_conf.input[argument].s[index] = source
        self._learn(op)

    def add_source(self, op: Any, argument: str, source: str, layout: Any) -> None:
        """Add an argument with the value `source` to a model operation.

        `layout` is the layout of the argument; with None, OneFlow chooses.
        """
        op.user_conf.input[argument].s.append(source)
        op.user_conf.input_order.append(argument)
        self._learn(op)
        self._set_layout(op.name, f"{argument}_0", layout)

    def redirect_output(self, op: Any, source: str) -> str:
        """Make a job output (an operation with `output_conf`) return the value `source`.

        Return the previous value.
        """
        before = getattr(op.output_conf, "in")
        setattr(op.output_conf, "in", source)
        self._learn(op)
        return before

    def append(
        self,
        like: Any,
        name: str,
        kind: str,
        inputs: Mapping[str, Sequence[str]],
        output: str = "",
        count: int = 1,
        layout: Any = None,
    ) -> Any:
        """Append a model operation of type `kind`, with the same placement as the operation `like`,
        and return it.

        `inputs` maps argument names to input values. `output` is the name of the output argument,
        if there is one. Its values are `NAME/OUTPUT_0` to `NAME/OUTPUT_{count - 1}`. With a
        `layout` of None, OneFlow chooses their layouts unless `lay_out` sets them.
        """
        op = self._job.net.op.add()
        op.name = name
        op.device_tag = like.device_tag
        op.scope_symbol_id = like.scope_symbol_id
        op.user_conf.op_type_name = kind
        for argument, sources in inputs.items():
            op.user_conf.input[argument].s.extend(sources)
            op.user_conf.input_order.append(argument)
        if output:
            op.user_conf.output[output].s.extend(
                f"{op.name}/{output}_{index}" for index in range(count)
            )
            op.user_conf.output_order.append(output)
        group = self._placement.get(like.name)
        if group is not None:
            group.op_set.op_name.append(op.name)
            self._placement[op.name] = group
        self.ops[op.name] = op
        self._learn(op)
        self.lay_out(op, layout)
        return op

    def describe_like(self, value: str, other: str) -> None:
        """Give `value` the shape and the data type of `other`."""
        self.shapes[value].CopyFrom(self.shapes[other])

    def lay_out(self, op: Any, layout: Any, **others: Any) -> None:
        """Set one layout (an `NdSbp`) for all inputs and outputs of an appended operation.

        `others` maps argument names to different layouts. With a layout of None, OneFlow chooses.
        """
        conf = op.user_conf
        entries = [*conf.input.items(), *conf.output.items()]
        for key, name in [
            (key, f"{key}_{index}") for key, entry in entries for index in range(len(entry.s))
        ]:
            self._set_layout(op.name, name, others.get(key, layout))

    def _set_layout(self, op_name: str, name: str, layout: Any) -> None:
        if layout is None:
            return
        self.layouts.op_name2nd_sbp_signature_conf[op_name].bn_in_op2nd_sbp[name].CopyFrom(layout)
        if (
            len(layout.sbp_parallel) == 1
        ):  # a one-row placement also has its layout in a second table
            flat = self.layouts.op_name2sbp_signature_conf[op_name].bn_in_op2sbp_parallel
            flat[name].CopyFrom(layout.sbp_parallel[0])

    def layout_of_value(self, value: str) -> Any:
        """Return the layout with which its maker makes a value, or None if unset."""
        return self.layout_of(*value.split("/"))

    def layout_of(self, op_name: str, name: str) -> Any:
        """Return the layout (an `NdSbp`) of an operation's input or output, such as `out_0`, or
        None if unset.
        """
        signature = self.layouts.op_name2nd_sbp_signature_conf.get(op_name)  # [] would add an entry
        return signature.bn_in_op2nd_sbp.get(name) if signature is not None else None

    def set_sources(self, op: Any, argument: str, sources: Sequence[str]) -> None:
        """Replace the values of an argument, which have one layout. `sources` may be fewer."""
        values = op.user_conf.input[argument].s
        for index in range(len(sources), len(values)):
            name = f"{argument}_{index}"
            self.layouts.op_name2nd_sbp_signature_conf[op.name].bn_in_op2nd_sbp.pop(name, None)
            self.layouts.op_name2sbp_signature_conf[op.name].bn_in_op2sbp_parallel.pop(name, None)
        values[:] = sources
        self._learn(op)

    def remove(self, name: str) -> None:
        """Remove an operation from the job. No other operation may still read its outputs."""
        del self.ops[name]
        for maker in self._mentions.pop(name):
            self._readers[maker].pop(name, None)
        self.layouts.op_name2sbp_signature_conf.pop(name, None)
        self.layouts.op_name2nd_sbp_signature_conf.pop(name, None)
        self.layouts.op_name2is_local_parallel_view.pop(name, None)
        self._removed.add(name)

    def _learn(self, op: Any) -> None:
        """Update the index for an operation, based on the values that it reads."""
        mentions = set(_mentioned(op)) - {op.name}
        for maker in self._mentions.get(op.name, set()) - mentions:
            self._readers[maker].pop(op.name, None)
        for maker in mentions:
            self._readers.setdefault(maker, {})[op.name] = None
        self._mentions[op.name] = mentions

    def _take_out(self) -> None:
        """Delete the removed operations from the lists of the job, in one pass over each list."""
        operations = self._job.net.op
        operations.sort(
            key=lambda op: op.name in self._removed
        )  # stable sort: the other operations keep their order
        del operations[len(operations) - len(self._removed) :]
        for group in self._job.placement.placement_group:
            names = group.op_set.op_name
            if not self._removed.isdisjoint(names):
                names[:] = [name for name in names if name not in self._removed]
        self._removed = set()


def source_of(op: Any, argument: str) -> str:
    """Return the first value of an argument of a model operation."""
    return op.user_conf.input[argument].s[0]


def result_of(op: Any) -> str:
    """Return the first value that a model operation makes."""
    return next(iter(op.user_conf.output.values())).s[0]


def _maker(value: str) -> str:
    """Return the name of the operation that produces a value."""
    return value.split("/", 1)[0]


def _mentioned(op: Any) -> Iterator[str]:
    """Yield the names of operations that `op` reads from or waits for."""
    yield from op.ctrl_in_op_name
    if op.HasField("user_conf"):
        for sources in op.user_conf.input.values():
            yield from map(_maker, sources.s)
        return
    conf = getattr(op, op.WhichOneof("op_type"))
    yield from (_maker(text) for text in _texts(conf) if "/" in text)


def _texts(message: Any) -> Iterator[str]:
    """Yield all strings in a protobuf message."""
    for field, value in message.ListFields():
        kind = field.message_type
        if field.label == field.LABEL_REPEATED and kind is not None and kind.GetOptions().map_entry:
            continue  # maps in these operations contain layouts by names within an operation
        for item in value if field.label == field.LABEL_REPEATED else [value]:
            if field.type == field.TYPE_MESSAGE:
                yield from _texts(item)
            elif field.type == field.TYPE_STRING:
                yield item
