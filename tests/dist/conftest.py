"""The fixture `check` for tests with a parameter `cell`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from cells import Cell, run_cells


def _cell_of(item: pytest.Item) -> Cell | None:
    return item.callspec.params.get("cell") if hasattr(item, "callspec") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put cells last, ordered by their number of ranks, so that one job runs at a time."""
    items.sort(key=lambda item: cell.ranks if (cell := _cell_of(item)) else 0)


@pytest.fixture(scope="session")
def check(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Cell], None]]:
    """`check(cell)` fails if the cell does.

    The first call for a number of ranks starts the job that runs all selected cells for it; each
    call waits until its own cell has ended.
    """
    selected = [cell for item in request.session.items if (cell := _cell_of(item))]
    running = {}
    errors = {}

    def check(cell: Cell) -> None:
        if cell.ranks not in running:
            names = [str(one) for one in selected if one.ranks == cell.ranks]
            running[cell.ranks] = run_cells(
                names, cell.ranks, tmp_path_factory.mktemp(f"ranks{cell.ranks}")
            )
        while str(cell) not in errors:
            ended = next(running[cell.ranks], None)
            assert ended, f"the job of {cell.ranks} ranks has failed, see the first error"
            errors.update([ended])
        if errors[str(cell)]:
            pytest.fail(errors[str(cell)], pytrace=False)

    yield check
    for job in running.values():
        if len(errors) == len(selected):
            assert list(job) == []  # the job also ends well
        job.close()
