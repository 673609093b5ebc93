"""Lists every private name of torch that the service uses, and looks each one up.

Torch may drop or rename these in any release. A lookup then says in one sentence what is missing and what for, and only
what needs the name cannot work. To use another one, add its row: ``tests/torch_internals`` finds any that has none.
Operators of ATen are no private names, however they are spelled: they are the vocabulary of traced graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from service.torch_internals.releases import TRIED, listed

_NO_ATTRIBUTE = object()


@dataclass(frozen=True)
class Internal:
    """A private name: what Trivet needs it to do, and the tried releases of torch that have it."""

    purpose: str
    releases: tuple[str, ...] = TRIED


class TorchInternalMissing(Exception):  # noqa: N818
    """The installed torch has no such private name: what needs it cannot work, all else can."""

    def __init__(self, name: str) -> None:
        row = INTERNALS[name]
        version = sys.modules["torch"].__version__
        super().__init__(
            f"torch {version} has no {name}, which Trivet needs to {row.purpose}; "
            f"install a release that has it: {listed(row.releases)}"
        )


def internal(name: str) -> Any:
    """Return the object that the table lists by this dotted name. Raises :class:`TorchInternalMissing` without it."""
    found = _resolved(name)
    if found is _NO_ATTRIBUTE:
        raise TorchInternalMissing(name)
    return found


def internal_if_there(name: str) -> Any:
    """Return the object of this name; ``None`` where torch lacks it, for a caller that can do without."""
    found = _resolved(name)
    return None if found is _NO_ATTRIBUTE else found


def internal_of(owner: object, name: str) -> Any:
    """Return the attribute of ``owner`` that the table lists by its class, as ``torch.Tensor._base``. Raises
    :class:`TorchInternalMissing` without it.
    """
    try:
        return getattr(owner, name.rpartition(".")[2])
    except AttributeError:
        raise TorchInternalMissing(name) from None


def set_internal(name: str, value: Any) -> None:
    """Set this name of torch; where torch lacks it, nothing would read it, and nothing is set."""
    if internal_if_there(name) is not None:
        owner, _, attribute = name.rpartition(".")
        setattr(_look_up(owner), attribute, value)


def _resolved(name: str) -> Any:
    if name not in INTERNALS:
        raise KeyError(f"{name} is not in the table of torch's private names")
    return _look_up(name)


def _look_up(name: str) -> Any:
    path, *parts = name.split(".")
    found: Any = import_module(path)
    for part in parts:
        path = f"{path}.{part}"
        found = sys.modules.get(path) or getattr(found, part, _NO_ATTRIBUTE)
        if found is _NO_ATTRIBUTE:
            found = _module(path)
        if found is _NO_ATTRIBUTE:
            break
    return found


def _module(path: str) -> Any:
    """Import a module of torch that nothing has imported yet."""
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not path.startswith(error.name):
            raise  # it is there, and lacks a package of others
        return _NO_ATTRIBUTE


_BEFORE_2_13, _SINCE_2_13 = ("2.11",), ("2.13", "2.14")

INTERNALS: Mapping[str, Internal] = {
    # Tensors, modules and autograd
    "torch.Tensor._backward_hooks": Internal("find hooks that a sharded parameter would lose"),
    "torch.Tensor._base": Internal("tell a view from what owns its memory"),
    "torch.Tensor._make_wrapper_subclass": Internal("bound models with DTensors"),
    "torch.Tensor._post_accumulate_grad_hooks": Internal("find hooks that a sharded parameter would lose"),
    "torch.Tensor._use_count": Internal("see whether something besides Python holds a tensor"),
    "torch.UntypedStorage._cdata": Internal("tell which tensors share memory"),
    "torch.UntypedStorage._new_with_weak_ptr": Internal("look at the memory of CUDA graphs without holding it"),
    "torch._C._jit_set_onnx_log_enabled": Internal("keep graphs that are not ONNX out of a job's log"),
    "torch._C._storage_Use_Count": Internal("count what holds a tensor's memory"),
    "torch._C._current_graph_task_id": Internal("know whether a backward is running"),
    "torch._C.DisableTorchFunction": Internal("keep a watch over a program from watching itself"),
    "torch._C.DisableTorchFunctionSubclass": Internal("bound models with DTensors"),
    "torch._foreach_mul_": Internal("clip gradients"),
    "torch._foreach_norm": Internal("take the norm of all gradients at once"),
    "torch._foreach_zero_": Internal("restart the optimiser of slopes"),
    "torch._ops.OpOverload": Internal("know the operators of a graph"),
    "torch.ops.aten.relu.default._schema": Internal("read an operator's arguments"),
    "torch._scaled_mm": Internal("multiply in float8"),
    "torch._subclasses.fake_tensor.FakeTensor": Internal("find copies to the host in a graph"),
    "torch.autograd._engine_run_backward": Internal("see every backward of a program"),
    "torch.nn.Module._call_impl": Internal("compile a bare Sequential"),
    "torch.nn.Module._compiled_call_impl": Internal("know which modules are compiled, and watch their calls"),
    "torch.nn.Module._non_persistent_buffers_set": Internal("know which buffers a state dict holds"),
    "torch.overrides._get_current_function_mode_stack": Internal("watch a program's eager calls"),
    "torch.overrides._pop_mode": Internal("watch a program's eager calls"),
    "torch.overrides._push_mode": Internal("watch a program's eager calls"),
    "torch.profiler.profile.profiler": Internal("read a profile without its processing for display"),
    "torch.utils._python_dispatch.TorchDispatchMode": Internal("compute what TF32 would give"),
    "torch.utils._python_dispatch._disable_current_modes": Internal("keep a watch over a program from watching itself"),
    "torch.utils.checkpoint.CheckpointFunction": Internal("see whether a program recomputes activations"),
    "torch.utils.checkpoint._CheckpointFrame": Internal("see whether a program recomputes activations"),
    # Groups, sharding and launching
    "torch.cuda._is_in_bad_fork": Internal("know whether a fork may use CUDA"),
    "torch.distributed._functional_collectives": Internal("bound models that use torch's own collectives"),
    "torch.distributed._functional_collectives._resolve_group_name": Internal("know the group of a traced collective"),
    "torch.distributed.distributed_c10d._abort_process_group": Internal("leave a group whose collectives never end"),
    "torch.distributed.distributed_c10d._get_default_store": Internal("let ranks agree without collectives"),
    "torch.distributed.distributed_c10d._pickler": Internal("sign the objects that ranks exchange"),
    "torch.distributed.distributed_c10d._resolve_process_group": Internal("find the group of a collective"),
    "torch.distributed.distributed_c10d._unpickler": Internal("refuse objects from outside the group"),
    "torch.distributed.elastic.multiprocessing.api.get_subprocess_handler": Internal("start ranks as forks"),
    "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler._popen": Internal(
        "start ranks as forks"
    ),
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": Internal("reduce gradients outside of a backward"),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group": Internal(
        "reduce gradients outside of a backward", _BEFORE_2_13
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups": Internal(
        "reduce gradients outside of a backward", _SINCE_2_13
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback": Internal(
        "end a step of FSDP2 outside of a backward"
    ),
    "torch.distributed.rendezvous._rendezvous_handlers": Internal("let the ranks of a script meet without a port"),
    "torch.distributed.tensor.DTensor._local_tensor": Internal("see a rank's part of a distributed tensor"),
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": Internal("load a rank's part of weights"),
    "torch.export.exported_program._split_decomp_table_to_cia_and_python_decomp": Internal("decompose traced models"),
    # Dynamo
    "torch._dynamo.backends.common.aot_autograd": Internal("rehearse CUDA graphs on a CPU"),
    "torch._dynamo.callback.callback_handler": Internal("count recordings of CUDA graphs"),
    "torch._dynamo.config": Internal("find settings that leave code uncompiled"),
    "torch._dynamo.eval_frame.OptimizedModule._orig_mod": Internal("know which modules are compiled"),
    "torch._dynamo.eval_frame._stance": Internal("find a stance that leaves code uncompiled"),
    "torch.compile._torchdynamo_orig_callable": Internal("know which functions are compiled"),
    "torch.compiler.disable._torchdynamo_disable": Internal("find code that is marked to stay uncompiled"),
    "torch._dynamo.exc.BackendCompilerFailed": Internal("tell the host's faults from a program's"),
    "torch._dynamo.package.DynamoCache._path_prefix": Internal("keep compiled code in a job's own folder"),
    "torch._dynamo.symbolic_convert.InliningInstructionTranslator.inline_call": Internal("see FSDP2's hooks in graphs"),
    "torch._dynamo.trace_rules.check": Internal("know which modules Dynamo skips"),
    "torch._dynamo.utils": Internal("read what the compiler records"),
    # AOTAutograd and Inductor
    "torch._functorch._aot_autograd.utils.make_boxed_func": Internal("rehearse CUDA graphs on a CPU"),
    "torch._functorch.config": Internal("let the compiler recompute activations selectively"),
    "torch._inductor.codecache._HEADER_DIR": Internal("keep the compiler's headers from job to job"),
    "torch._inductor.codecache._HEADER_LOCK_DIR": Internal("keep the compiler's headers from job to job"),
    "torch._inductor.codecache._precompile_header": Internal("prepare the compiler's headers beforehand"),
    "torch._inductor.codecache.CppPythonBindingsCodeCache": Internal("prepare the compiler's headers beforehand"),
    "torch._inductor.compile_fx.compile_fx": Internal("capture CUDA graphs under FSDP2"),
    "torch._inductor.compile_fx.compile_fx_inner": Internal("capture CUDA graphs under FSDP2"),
    "torch._inductor.compiler_bisector": Internal("name the compiler's part that is at fault"),
    "torch._inductor.config": Internal("let generated code draw eager's random numbers"),
    "torch._inductor.cpp_builder": Internal("know the C++ compiler's version"),
    "torch._inductor.cpu_vec_isa": Internal("start code generation without all of its probes"),
    "torch._inductor.cudagraph_trees.get_manager": Internal("prove that CUDA graphs were captured"),
    "torch._inductor.cudagraph_trees.mark_step_begin": Internal("hear who marks a step of CUDA graphs"),
    "torch._inductor.cudagraph_trees.reset_cudagraph_trees": Internal("capture CUDA graphs under FSDP2"),
    "torch._inductor.cudagraph_utils.cudagraphs_log": Internal("read why CUDA graphs were skipped"),
    "torch._inductor.exc.InvalidCxxCompiler": Internal("tell the host's faults from a program's"),
    "torch._inductor.list_mode_options": Internal("capture CUDA graphs under FSDP2"),
    "torch._inductor.runtime.autotune_cache.AutotuneCache.save": Internal("run kernels that another job compiled"),
    "torch._inductor.runtime.cache_dir_utils.default_cache_dir": Internal("find the folder of compiled code"),
    "torch._inductor.utils.clear_caches": Internal("compile anew"),
    "torch._logging._internal": Internal("keep the compiler's structured trace"),
    "torch.compiler._cache.CacheArtifactManager": Internal("give other processes no more compiled code than they need"),
}
"""By dotted name. The attributes of a module or class in the table are private with it."""
