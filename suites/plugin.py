"""The pytest plugin: kernel tests on the op-level matrix, and the servers of a comparison. See ``docs/library.md``.

pytest loads it in every environment with assay, so nothing heavy is imported until a test uses a fixture.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Unpack

import pytest

if TYPE_CHECKING:
    from assay.harness.attention.call import Kernel
    from assay.harness.checks.kernel_matrix import MatrixOptions
    from assay.harness.evidence.kernel_result import KernelResult

pytest_plugins = ("assay.suites.fixtures",)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--assay-size`` and ``--assay-device`` for kernels, ``--assay-reference`` and ``--assay-candidate`` for servers."""
    group = parser.getgroup("assay-kernels", "assay: kernels on the op-level matrix, and servers")
    group.addoption(
        "--assay-size", choices=("small", "full"), default=None, dest="assay_matrix_size",
        help="matrix for checks that do not name a size: small (the default), or full (longer sequences, more heads)",
    )  # fmt: skip
    group.addoption(
        "--assay-device", default=None, dest="assay_matrix_device",
        help="device for checks that do not name one; by default a GPU, if any",
    )  # fmt: skip

    for role in ("reference", "candidate"):
        group.addoption(
            f"--assay-{role}", default=None, dest=f"assay_{role}",
            help=f"backend, kernel as module:function, or URL of {role}_server; by default from assay.toml",
        )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Make a list for results."""
    config.stash[_RESULTS] = []


_RESULTS = pytest.StashKey["list[KernelResult]"]()


class Assay:
    """The fixture `assay`: checks kernels."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def check(
        self,
        kernel: str | Kernel,
        *,
        noise: str | None = None,
        case: str | None = None,
        read_out: float = 60.0,
        **options: Unpack[MatrixOptions],
    ) -> KernelResult:
        """Run a kernel on the op-level matrix and fail unless it is correct.

        A kernel is correct if every call that it computes is within its bound, if it does not write to its inputs or keep state,
        if it gives the same output twice, and if it computes calls in every phase that it declares: with a cached prefix, and in
        extend also without one.

        Args:
            kernel: A published name, ``module:function``, or the kernel itself.
            noise: Allowed noise family, such as "int8_qk", or None for the one that the kernel declares.
            case: Run only cases whose name contains this.
            read_out: Most seconds to spend on reading out a wrong kernel for the message, or 0 to skip it.
            options: `phases`, `dtypes`, `head_dims`, `like`, `seed`, and `size` and `device`, which default to ``--assay-size``
                and ``--assay-device``; see `assay.harness.checks.kernel_matrix.MatrixOptions`.

        Returns:
            The result: computed and refused calls, and findings.

        Raises:
            AssertionError: The kernel is wrong, or there is not enough evidence that it is correct; the message is the diagnosis.
            assay.harness.errors.UsageError: No such kernel, phase, dtype, noise, size or device.
        """
        __tracebackhide__ = True
        _prepare(self._config)
        from assay.harness.checks.jobs import check
        from assay.reports.check import message

        options["size"] = options.get("size") or self._config.getoption("assay_matrix_size") or "small"
        options["device"] = options.get("device") or self._config.getoption("assay_matrix_device")
        result = check(kernel, noise=noise, case=case, read_out=read_out, **options)
        self._config.stash[_RESULTS].append(result)
        if result.exit_code:
            raise AssertionError(message(result))
        return result


@pytest.fixture
def assay(request: pytest.FixtureRequest) -> Assay:
    """Check attention kernels: ``assay.check("mypkg.attn:forward")``."""
    return Assay(request.config)


def _prepare(config: pytest.Config) -> None:
    """Prepare the module search path and, without a GPU, the interpreter, before a kernel is imported.

    A kernel named ``module:function`` is found in the same way as by the commands, with the tests' root folder and the folder in
    which pytest was called last in the search path. The command ``pytest`` itself adds neither to Python's path.
    """
    from assay.harness.attention.interpreter import interpret_without_gpu

    interpret_without_gpu()
    for folder in (config.rootpath, config.invocation_params.dir):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print one line if a kernel was checked."""
    if results := config.stash[_RESULTS]:
        from assay.reports.check import sentence

        terminalreporter.write_line(f"assay: {sentence(results)}")
