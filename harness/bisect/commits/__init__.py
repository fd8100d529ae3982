"""Find the commit that broke a kernel.

``git bisect`` trusts every outcome, counts only commits, and steps away from a commit that cannot be tested by a pseudo-random
distance. Here each outcome is evidence: the probability that a commit is the culprit follows from all outcomes so far and from
how often the same commit came out both ways. One wrong outcome costs a few more probes instead of the answer, and the answer
comes with its probability. The next probe is the most informative one, weighted by how likely the commit is to build: less likely
next to broken commits, and the longer the broken run, the less likely. Both ends are checked first, nothing that rests on them is
recorded before, and the answer is verified last, so a wrong ``--good``, a broken environment and a history that is not monotone are
reported rather than bisected. A probe imports the kernel in a process that never held another commit's kernel, and reports the file
it came from.

Where there are workers, several commits are probed at once: the batch whose outcomes together say the most. A probe is a task of an
executor (`assay.harness.sweep`), on this machine or another one.

Modules: `bisection` has the library calls, `search` decides what to probe (pure), `repo` is git, `worktrees` lends worktrees,
`probe_calls` holds the calls a kernel computes, `probe` runs in a commit's own process, `measure` builds a commit and starts that
process, `outcome` classifies its measurement, `state` is what is on disk, `bisect_session` connects them.
"""
