"""Lets a compiled job clip every element of the gradients, which OneFlow 0.9 does by norm only."""

from __future__ import annotations

from libai.oneflow_fixes.job.job_edit import JobEdit
from libai.oneflow_fixes.job.variables import is_update

_DECAY = "l1_l2_regularize_gradient"


def clip_by_value(job: JobEdit, limit: float) -> int:
    """Clip what the updates of a completed `job` take for gradients to ±`limit`, before weight decay is added.

    Call it before OneFlow compiles the job and before updates are joined. Returns how many gradients are clipped.
    """
    updates = [op for op in job.ops.values() if is_update(op)]
    for update in updates:
        reader, source = update, update.user_conf.input["model_diff"].s[0]
        maker = job.ops[source.split("/")[0]]
        if job.kind(maker) == _DECAY:
            reader, source = maker, maker.user_conf.input["model_diff"].s[0]
        clipped = job.append(reader, f"{update.name}-clip", "clip_by_scalar", {"x": [source]}, "y")
        for end, value in (("min", -limit), ("max", limit)):
            clipped.user_conf.attr[f"floating_{end}"].at_double = value
            clipped.user_conf.attr[f"integral_{end}"].at_int64 = 0
        layout = job.layout_of(reader.name, "model_diff_0")
        if layout is not None:
            job.lay_out(clipped, layout)
        job.set_source(reader, "model_diff", 0, clipped.user_conf.output["y"].s[0])
    return len(updates)
