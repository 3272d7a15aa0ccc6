"""The compiled training step, for any module that follows the model contract.

`TrainGraph` differs from a textbook `nn.Graph` in one way. Values that change with every iteration
(each group's learning rate, Adam's bias corrections) are not baked into the compiled job or
recomputed there in float32. They are passed to every call as small inputs. So every scheduler
works, a changed learning rate takes effect, and a step equals the eager one to the last bit.
docs/dev/decisions/0001-graph-reads-rates-from-inputs.md has the reasons.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.engine.compiled.buffers import traced_buffers
from libai.engine.compiled.tracing import Reads, tracing
from libai.engine.inputs import map_shares
from libai.engine.options import TrainOptions
from libai.forward.contract import read_losses, total_loss, weighted_total
from libai.native.kernels import are_kernels_on
from libai.parallel import GlobalLayout, Layout, named_tensors
from libai.patches.compiled_graph import (
    CompiledGraph,
    Uncompilable,
    refuse_uncompilable,
)
from libai.patches.job.clip import clip_by_value
from libai.patches.job.gradients import sum_gradients
from libai.patches.job.job_edit import JobEdit
from libai.patches.job.passes import JobFacts, repair_job, simplify_job
from libai.patches.job.refusals import refuse_job
from libai.patches.job.sums import order_sums
from libai.patches.job.variables import first_of_equal, is_update
from libai.patches.table import is_on

#: name of the user's module inside the graph, and thus the name prefix of its variables in a
#: compiled job
MODULE_NAME = "model"
#: name prefix of the op that reads the gradient norm in a job with clipping, for any order of the
#: norm
_CLIP_NORM_READER = "System-ClipGradient-GlobalNorm-AddEps"
#: options that decide which inputs an update op has; one compiled update supports only one value of
#: each
_STRUCTURAL = ("amsgrad", "centered")
#: names of the job inputs that hold the scalars of a step: `<scalar>_<group>_<stage>`
_STEP_INPUT = re.compile(r"_((?:lr|bias1|bias2)_\d+_\d+)$")


class TrainGraph(CompiledGraph):
    """One optimizer update as a compiled graph: forward, backward, clip over all groups, update.

    Args:
        model: the user's module, with its parameters already laid out (local, or global in a
            multi-process job).
        optimizer: the optimizer of the parameters of `model`.
        layout: the layout of `model`.
        options: the trainer's options. The inputs hold `num_accumulation_steps` micro-batches,
            concatenated on axis 0. Gradients are clipped after accumulation.
        recomputed_blocks: names of the modules to checkpoint; the backward pass recomputes their
            activations.
        random_scope: context manager factory entered around the forward with the graph's `key`
            input.
        auto_parallel: let OneFlow choose the layout of every operation's output with its own cost
            model.
        buffers: names of the buffers and frozen parameters that forward changes. Not supported with
            accumulation, in which a micro-batch would not read the values that the previous
            micro-batch has written.

    A call takes keyword tensors and returns `(losses, metrics, grad_norm | None, buffers)`. With
    accumulation the scalars have one element per micro-batch. `buffers` maps each name to its new
    value, and the caller writes it into the model. If the model cannot be compiled, OneFlow's error
    is raised unchanged.
    """

    #: compile time in seconds; set by the code that compiles the graph
    build_seconds: float | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: flow.optim.Optimizer,
        layout: Layout,
        options: TrainOptions,
        *,
        recomputed_blocks: Sequence[str] = (),
        random_scope: Callable[[Any], Any] = contextlib.nullcontext,
        auto_parallel: bool = False,
        buffers: Sequence[str] = (),
    ):
        super().__init__()
        self.model = model
        self._layout = layout
        self.reads: Reads = []
        self._changing = buffers
        self._accumulation = options.num_accumulation_steps
        self._uses_zero = options.zero_stage > 0
        self._clips = options.max_grad_norm is not None
        self._max_grad_value = options.max_grad_value
        self._random_scope = random_scope
        _prepare_groups(optimizer, options.max_grad_norm)
        self.add_optimizer(optimizer)
        _set_stages(self.model, layout)
        for name, module in self.model.named_modules(prefix=""):
            if name in recomputed_blocks:
                module.to(nn.graph.GraphModule).activation_checkpointing = True
        self._configure(options, auto_parallel)
        self._facts = self._job_facts(options, auto_parallel)

    def _configure(self, options: TrainOptions, auto_parallel: bool) -> None:
        """Set the options of the compiled job."""
        if self._accumulation > 1:
            self.config.set_gradient_accumulation_steps(self._accumulation)
        if options.amp is not None:
            dtypes = {"fp16": flow.float16, "bf16": flow.bfloat16}
            self.config.enable_amp(True, dtype=dtypes[options.amp])
        if options.amp == "fp16":
            self.set_grad_scaler(options.loss_scaling.for_graph())
        if auto_parallel:
            self.config.enable_auto_parallel(True)

    def _job_facts(self, options: TrainOptions, auto_parallel: bool) -> JobFacts:
        layout = self._layout
        is_cut = layout.cuts_parameters
        is_replicated = layout.mesh.device == "cpu" and not (is_cut or auto_parallel)
        # in these cases reading the variables directly is not safe
        # (docs/dev/decisions/0005-graph-variables.md)
        copied = named_tensors(self.model.to(nn.Module)) if self._accumulation > 1 or is_cut else ()
        return JobFacts(
            copied_variables=[f"{MODULE_NAME}.{name}" for name, _ in copied],
            joins_gradients=layout.mesh.data > 1 and is_replicated,
            fuses_operations=is_replicated and are_kernels_on(),
            may_skip=options.amp == "fp16" and options.loss_scaling.is_dynamic,
        )

    def build(
        self, batch: dict[str, Any], step: dict[str, Any], share: Any = None, key: Any = None
    ) -> Any:
        """Trace one micro-batch.

        `batch`: forward's arguments. `step`: scalars, which only the completed job reads. `share`:
        its weight among the counted items, or the weights of its losses. `key`: its random key.
        """
        with tracing(self.model, self.reads), self._random_scope(key), self._layout.source_ops():
            losses, metrics = read_losses(self.model(**batch), self.model.to(nn.Module))
            # a sum that includes an integer loss would end the process
            losses = {
                name: loss if loss.is_floating_point() else loss.float()
                for name, loss in losses.items()
            }
            if share is not None:
                total = weighted_total(losses, map_shares(share, flow.Tensor.sum))
            elif self._accumulation > 1:
                total = total_loss(losses) / self._accumulation
            else:
                total = total_loss(losses)
            refuse_uncompilable(self.model, self._changing, self._accumulation > 1, self._uses_zero)
            total.backward()
            buffers = traced_buffers(self.model, self._changing)
        # a placeholder: once the job is complete, the norm that clipping computes replaces it
        norm = total.detach() * 1.0 if self._clips else None
        return losses, {name: value.detach() for name, value in metrics.items()}, norm, buffers

    # ------------------------------------------------------------------ OneFlow 0.9.0 internals

    def _generate_config_proto(self) -> None:
        """Write one optimizer configuration for each kind of update, shared by all groups of that
        kind.

        The settings of the individual groups are written into the finished job (`edit_job`).
        """
        super()._generate_config_proto()
        confs = self.config.proto.train_conf.optimizer_conf
        _make_mixable(confs)
        self._group_confs = [deepcopy(conf) for conf in confs]
        self._group_of = {
            name: i for i, conf in enumerate(confs) for name in conf.variable_op_names
        }
        kinds: dict[str, Any] = {}
        for conf in self._group_confs:
            if not conf.variable_op_names:  # the whole group is frozen
                continue
            first = kinds.setdefault(_structure(conf), deepcopy(conf))
            if first.variable_op_names != conf.variable_op_names:
                first.variable_op_names.extend(conf.variable_op_names)
        dtypes = {
            parameter.dtype
            for parameter in self.model.to(nn.Module).parameters()
            if parameter.requires_grad
        }
        if self._clips and (len(dtypes) > 1 or (len(kinds) > 1 and self._layout.cuts_parameters)):
            raise Uncompilable(
                "train.clip_grad.max_norm needs one norm, and OneFlow 0.9 would compile a "
                f"separate norm for each dtype ({', '.join(map(str, dtypes))}) or, if ranks hold "
                f"parts of the parameters, kind of update ({', '.join(kinds)})",
                "use one dtype and optimizers of one kind, or do not clip",
            )
        del confs[:]
        confs.extend(kinds.values())

    def edit_job(self, out2name: Any) -> None:
        """Connect each parameter's update to the inputs and values of its group."""
        with JobEdit(self._full_job_proto) as job:
            self._connect(job, out2name)

    def _connect(self, job: JobEdit, out2name: Any) -> None:
        refuse_job(job)
        if is_on("ordered-sums"):
            order_sums(job, self._forward_job_proto)
        if self._accumulation > 1:
            sum_gradients(job)
        repair_job(job, self._facts)
        norm_source = ""
        step_values = self._step_values(job)
        for op in job.ops.values():
            if not op.HasField("user_conf"):
                continue
            if op.name.startswith(_CLIP_NORM_READER):
                norm_source = op.user_conf.input["in"].s[0]
            elif is_update(op):
                self._connect_update(job, op, step_values)
        if self._clips:
            self._return_norm(job, norm_source, out2name)
        if self._max_grad_value is not None:
            clip_by_value(job, self._max_grad_value)
        simplify_job(job, self._facts)

    def _step_values(self, job: JobEdit) -> dict[str, str]:
        """Return the step's inputs in the completed job: name of the input → operation output of
        shape `(1,)`.
        """
        found = {}
        for op in list(job.ops.values()):
            # nn.Graph names an input `_<graph>_input.<path>_<name>`, and our own names contain no
            # dots
            name = _STEP_INPUT.search(op.name) if op.HasField("input_conf") else None
            if name is not None:
                found[name[1]] = (
                    first_of_equal(job, op) if self._accumulation > 1 else f"{op.name}/out"
                )
        return found

    def _connect_update(self, job: JobEdit, op: Any, step_values: Mapping[str, str]) -> None:
        update = op.user_conf
        variable = update.input["model"].s[0].split("/")[0]
        group = self._group_of[variable]
        conf = self._group_confs[group]
        place = f"{group}_{self._layout.stage_of(variable.removeprefix(f'{MODULE_NAME}.'))}"
        inputs = {"learning_rate": f"lr_{place}"}
        if not self._facts.may_skip:
            # with dynamic loss scaling the graph may skip updates, so only the graph can count the
            # updates it makes
            inputs.update(bias_correction1=f"bias1_{place}", bias_correction2=f"bias2_{place}")
        for argument, name in inputs.items():
            if argument in update.input:
                job.set_source(op, argument, 0, step_values[name])
        update.attr["learning_rate_scale"].at_float = 1.0
        # AdamW and LAMB apply weight decay in the update op; for other optimizers OneFlow adds an
        # op for each variable
        update.attr["weight_decay"].at_float = conf.weight_decay_conf.weight_decay_rate
        for field, value in _kind_conf(conf).ListFields():
            if field.name in update.attr and field.name not in _STRUCTURAL:
                attribute = update.attr[field.name]
                setattr(attribute, attribute.WhichOneof("value"), value)

    def _return_norm(self, job: JobEdit, norm_source: str, out2name: Any) -> None:
        """Return the norm computed by clipping as the last output of the graph, in place of its
        placeholder.
        """
        output_name = out2name[self._eager_outputs[0][2]]
        unused = job.redirect_output(job.ops[output_name], norm_source)
        del job.ops[output_name].output_conf.blob_conf.shape.dim[:]
        del job.shapes[f"{output_name}/out"].shape.dim[:]
        job.remove(unused.split("/")[0])


def _prepare_groups(optimizer: flow.optim.Optimizer, max_norm: float | None) -> None:
    """Write the settings of the optimizer's groups as OneFlow can compile them."""
    for group in optimizer.param_groups:
        for key, value in group._options.items():
            if isinstance(value, np.number):  # which OneFlow cannot compile
                group._options[key] = value.item()
        group._enable_clip_grad = max_norm is not None
        if max_norm is not None:
            group["clip_grad_max_norm"] = float(max_norm)
            group["clip_grad_norm_type"] = 2.0


def _set_stages(proxy: Any, layout: Layout) -> None:
    """Set the pipeline stage of every module under a graph's `proxy` of the model."""
    if not isinstance(layout, GlobalLayout) or layout.mesh.pipeline == 1:
        return
    for name, module in proxy.named_modules(prefix=""):
        stage = layout.stage_of_module(name)
        if stage is not None:
            module.to(nn.graph.GraphModule).set_stage(stage, layout.placement(stage))


def _kind_conf(conf: Any) -> Any:
    """Return the sub-message with the hyperparameters of one kind of optimizer (`adam_conf`,
    `momentum_conf`, ...).
    """
    return getattr(conf, conf.WhichOneof("normal_mdupdt"))


def _structure(conf: Any) -> str:
    """Return the kind of update and the options that must be equal in all groups of one compiled
    update.
    """
    kind = _kind_conf(conf)
    flags = [f"{name}={getattr(kind, name)}" for name in _STRUCTURAL if hasattr(kind, name)]
    return " ".join([conf.WhichOneof("normal_mdupdt"), *flags])


def _make_mixable(confs: Any) -> None:
    """Rewrite options that may differ between groups, to give all groups one kind of update op.

    The result of the update stays the same.
    """
    has_momentum = any(conf.HasField("momentum_conf") for conf in confs)
    corrects_bias = any(getattr(_kind_conf(conf), "do_bias_correction", False) for conf in confs)
    for conf in confs:
        if has_momentum and conf.HasField("naive_conf"):
            conf.momentum_conf.beta = 0.0  # the velocity is then the gradient itself
        kind = _kind_conf(conf)
        if corrects_bias and hasattr(kind, "do_bias_correction"):
            kind.do_bias_correction = (
                True  # uses the group's own buffers, which hold 1 if nothing is corrected
            )
