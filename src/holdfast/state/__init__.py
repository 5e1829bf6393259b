"""Tensors at rest: what a job's state is, how it is copied, sent, written and cut anew.

    tree         any state ↔ a skeleton (msgpack, no pickle) and a list of tensors; writer, reader, leaves: its parts
    sharded      what a DTensor is without its process group
    tracked      the objects a script names with `job.track`: their state out of them and back into them, in place
    modules      how that is done with a module, optimizers with an optimizer, copies with a single value
    volatile     what a forward and a backward change, kept so that a step can be repeated
    snapshot     a copy of a state in one arena of bytes; two of them, one always whole
    checkpoint   a directory that is there only when it is complete
    safetensors  the file format of a checkpoint's parts
    parts        a state cut into shares, each an image of the storage room: cutting, filling
    loading      the state in such images into live objects, cut as it was or anew
    moves        their bytes, block by block, verified, by a few threads
    reshard      the state of S shards into that of a new world size, tensor by tensor

It knows nothing of views, agents or the wire: whoever moves the bytes is somebody else.
"""
