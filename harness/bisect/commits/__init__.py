"""Which commit broke a kernel.

``git bisect`` takes every verdict for certain, counts only commits, and steps away from a commit that cannot be tested by a
pseudo-random distance. Here each verdict is evidence: the probability that a commit is the culprit follows from all verdicts so
far and from how often the same commit was judged two ways, so one wrong verdict costs some more probes instead of the answer,
and the answer comes with its probability. What to test next is what tells most, weighed by how likely it is to build: a commit
beside broken ones less so, the more of them in a row. Both ends are proven first and the answer is checked last, so a wrong
``--good``, a broken environment and a history that is not monotone are said instead of bisected. A probe imports the kernel in
a process that never held another commit's, and says which file it came from.

Roles: `search` decides what to test (pure), `repo` is git, `calls` is what is asked of a kernel, `probe` runs in a commit's own
process, `executor` starts it, `judge` makes verdicts of what it measured, `state` is what lies on disk, `session` puts
them together, `ui` shows it.
"""
