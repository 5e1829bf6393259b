"""Tensors at rest: what a job's state is, how it is copied, sent, written and resharded.

    tree.py               any state ↔ a skeleton (msgpack, no pickle) and a list of tensors
    tensor_specs.py       what a tensor of a skeleton is; encode.py, decode.py: values ↔ nodes of a skeleton
    dtensors.py           a DTensor without its process group: its local tensor and where that lies
    tracked.py            the objects a script names with `job.track`: their state out of them and back, in place
    modules.py            how that is done with a module; optimizers.py with an optimizer, param_groups.py its groups,
                          tensor_copy.py a single value, module_flags.py what a script switches, generators.py
    per_rank_state.py     state that each rank has for itself
    cached_state.py       the state again and again, without a full walk while only values change
    step_backup.py        what a forward and a backward change, saved so that a step can be repeated
    arena.py              a copy of a state in one allocation
    copier.py             a copy made by a thread while the training goes on
    partition.py          a state divided into shares, each an image (storage/image.py)
    union_tree.py         the trees of several shards as one; plain_copies.py compares what they have under one name
    load_parts.py         the state of such images into live objects; block_loader.py copies their bytes, verified
    reshard.py            the state of S shards into that of another world size, tensor by tensor
    export.py             a checkpoint as plain safetensors (safetensors_files.py)
    epoch_files.py        torch.save files of other scripts

It knows nothing of views, agents or the wire: other packages move the bytes.
"""
