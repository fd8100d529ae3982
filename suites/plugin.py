"""The pytest plugin: a kernel's own tests on the op-level matrix. See ``docs/library.md``.

pytest loads it in every environment that has assay, so nothing heavy is imported until a test uses a fixture.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Unpack

import pytest

if TYPE_CHECKING:
    from assay.harness.attention.call import Kernel
    from assay.harness.checks.kernel_matrix import MatrixOptions
    from assay.harness.evidence.kernel_result import KernelResult

_MARKER = "assay_kernel"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--assay-size`` and ``--assay-device``."""
    group = parser.getgroup("assay-kernels", "assay: kernels on the op-level matrix")
    group.addoption(
        "--assay-size", choices=("small", "full"), default=None, dest="assay_matrix_size",
        help="matrix for checks that name no size: small (the default), or full (longer sequences, more heads)",
    )  # fmt: skip
    group.addoption(
        "--assay-device", default=None, dest="assay_matrix_device",
        help="device for checks that name none; a GPU by default, if there is one",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and a place for results."""
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(kernel, phases=None, dtypes=None, head_dims=(64, 128), size='small'): run the test once for each "
        "case of the matrix; the test uses the fixture assay_case",
    )
    config.stash[_RESULTS] = []
    config.stash[_BY_CASE] = {}


_RESULTS = pytest.StashKey["list[KernelResult]"]()
# The results of each kernel and options on its cases: one process checks all that are collected.
_BY_CASE = pytest.StashKey["dict[str, dict[str, KernelResult]]"]()


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

        A kernel is correct if every call that it computes is within its bound, it does not write to its inputs, keeps no state,
        gives the same output twice, and computes calls of every phase that it declares: with a cached prefix, in extend also
        without.

        Args:
            kernel: A published name, ``module:function``, or the kernel itself.
            noise: Noise family whose noise is allowed, for example "int8_qk"; None for what the kernel declares.
            case: Run only cases whose name contains this.
            read_out: Most seconds that reading a wrong kernel takes, for the message; 0 not to read it.
            options: `phases`, `dtypes`, `head_dims`, `like`, `seed`, and `size` and `device`, which are otherwise those of
                ``--assay-size`` and ``--assay-device``; see `assay.harness.checks.kernel_matrix.MatrixOptions`.

        Returns:
            What was computed, refused and found.

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


class AssayCase:
    """The fixture `assay_case`: one case of the matrix, and the kernel of the test's marker.

    Attributes:
        kernel: The kernel, as the marker names it.
        case: The name of the case.
    """

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.kernel, self.case, self._options = request.param
        self._request = request

    def check(self) -> KernelResult:
        """Run the kernel on the case and fail unless it is correct.

        The test is skipped if the kernel's declaration excludes the case, or if the kernel refuses what it does not claim, such as
        a head dim of 80. Another case that the kernel refuses without having declared
        so is not covered, which is no pass: the test fails.

        Raises:
            AssertionError: The kernel is wrong, and the message is the diagnosis; or it refuses the case.
        """
        __tracebackhide__ = True
        from assay.harness.errors import ExitCode
        from assay.reports.check import message

        result = self._result()
        if result.excluded:
            pytest.skip(f"not covered: {result.excluded[0].why}")
        self._request.config.stash[_RESULTS].append(result)
        if result.refused:
            raise AssertionError(
                f"not covered: the kernel refused {self.case}: {result.refused[0].why}\n"
                "Expected: an output of every case that its declaration does not exclude\n"
                "What to do: declare what it supports, for example @declares(head_dims=(64, 128))"
            )
        if result.exit_code == ExitCode.REGRESSION or not result.computed:
            raise AssertionError(message(result))
        return result

    def _result(self) -> KernelResult:
        """Return the result of this case; the first one checks all cases of the kernel that are collected, in one process."""
        from assay.harness.checks.jobs import check_each

        known = self._request.config.stash[_BY_CASE].setdefault(repr((self.kernel, self._options)), {})
        if self.case not in known:
            params = [getattr(item, "callspec", None) for item in self._request.session.items]
            cases = [spec.params["assay_case"] for spec in params if spec and "assay_case" in spec.params]
            names = [name for kernel, name, options in cases if (kernel, options) == (self.kernel, self._options)]
            known.update(check_each(self.kernel, list(dict.fromkeys([self.case, *names])), **self._options))
        return known[self.case]


@pytest.fixture
def assay(request: pytest.FixtureRequest) -> Assay:
    """Check attention kernels: ``assay.check("mypkg.attn:forward")``."""
    return Assay(request.config)


@pytest.fixture
def assay_case(request: pytest.FixtureRequest) -> AssayCase:
    """Return one case of the matrix, in a test marked ``@pytest.mark.assay_kernel("mypkg.attn:forward")``."""
    return AssayCase(request)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that uses `assay_case` once for each case."""
    if "assay_case" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker(_MARKER)
    if marker is None or len(marker.args) != 1:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid} uses assay_case but names no kernel.\n"
            "Expected: one kernel, as the marker's only positional argument\n"
            f"What to do: mark the test with @pytest.mark.{_MARKER}('module:function')"
        )
    _prepare(metafunc.config)
    from assay.harness.attention.declaration import declaration
    from assay.harness.checks.check_findings import LEAST_LEFT
    from assay.harness.checks.kernel_matrix import matrix_of, named
    from assay.harness.errors import UsageError
    from assay.harness.localize.threads import few_threads

    option = metafunc.config.getoption
    given = dict(marker.kwargs)
    given["size"] = given.get("size") or option("assay_matrix_size") or "small"
    given["device"] = given.get("device") or option("assay_matrix_device")
    try:
        kernel = named(marker.args[0])[1]
        made = matrix_of(declaration(kernel), **given)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    with few_threads(()):
        left = sum(not declaration(kernel).excludes(case.make()) for case in made)
    if left < LEAST_LEFT * len(made):
        raise pytest.UsageError(
            f"{marker.args[0]} declares so little that {left} of {len(made)} cases are left: the others would be skipped.\n"
            "Expected: cases of what it declares\n"
            f"What to do: correct @declares, or what {metafunc.definition.nodeid} asks for"
        )
    metafunc.parametrize(
        "assay_case",
        [(marker.args[0], case.name, given) for case in made],
        ids=[case.name for case in made],
        indirect=True,
    )


def _prepare(config: pytest.Config) -> None:
    """Prepare, before a kernel is imported, where its module is looked for, and what executes it if there is no GPU.

    A kernel named ``module:function`` is looked for as the commands do, and last: in the root folder of the tests, and in the
    folder in which pytest was called. The command ``pytest`` adds neither to Python's path by itself.
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
