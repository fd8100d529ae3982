"""A stand-in for SGLang that starts within a second and answers at once: for tests of what happens around a server.

It is found instead of SGLang where its folder comes first on PYTHONPATH. It does for a run what SGLang with assay's plugin does: it
asks for the key, lists its model, reports its arguments, caches the shared header, counts calls, notes admissions, has a child
process, and leaves a file in shared memory and one in the temporary folder. It misbehaves as ``STAND_IN_FAILS`` says.
"""
