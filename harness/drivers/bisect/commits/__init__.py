"""Find the commit that broke a kernel, as ``git bisect`` does, with outcomes that are measured.

A commit is probed until one outcome leads clearly: a kernel that races comes out both ways. Both ends are checked first, so a
wrong ``--good``, a broken environment and calls that do not show the error are reported rather than bisected. Every probe imports
the kernel in a process of its own and reports the file that it came from.

Modules: `bisection` has the library calls and the search, `repo` is git and the worktree, `calls` holds what a kernel computes,
`probe` runs in a commit's own process, `measure` builds a commit and starts that process, `outcome` classifies a measurement, and
`state` is what is on disk.
"""
