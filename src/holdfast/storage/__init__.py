"""Checkpoints at rest: bytes, files and stores. No torch: agents, which have none, read and write here too.

    pieces       what a tensor in an image is: name, dtype, shape, its place in the whole and in the file
    image        a part of a state as one run of bytes: in shared memory, in a file, on the way; what lies where
    header       the head of an image, which is that of a safetensors file: written, and read trusting nothing
    frames       what stands around each tensor, so that stock torch takes it for an archive of its own
    pickles      the two pickles that stock torch wants to find, written opcode by opcode
    objects      what a state holds beside its tensors, for stock torch
    sources      an image to read from, every block verified: memory, a file, or whatever reads a range of bytes
"""
