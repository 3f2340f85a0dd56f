"""bin/watch on the store of a small run, called in this process."""

import json
from pathlib import Path

import anyio
import pytest

from bin.watch import main
from runtime.node.page_url import url_of_watch
from runtime.node.reopen import find_run
from tests.bin.test_ledger import RUN, content_of, make
from tests.support.commands import called


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that is over; tests only read it."""
    return anyio.run(make, tmp_path_factory.mktemp("runs") / RUN)


def test_the_times_of_a_run_that_ended_are_printed_and_nothing_is_written(ended: Path) -> None:
    before = content_of(ended)
    done = called(main, str(ended), "--time")
    assert done.returncode == 0, done.stderr
    assert " in 1 step, " in done.stdout.splitlines()[0]
    told = json.loads(called(main, str(ended), "--time", "--json").stdout)
    assert (told["run"], [step["step"] for step in told["steps"]]) == (RUN, [1])
    assert sum(told["seconds"].values()) == pytest.approx(sum(sum(step["parts"].values()) for step in told["steps"]))
    assert content_of(ended) == before


def test_an_address_that_others_reach_is_refused_in_one_line(ended: Path) -> None:
    done = called(main, str(ended), "--page", "0.0.0.0:80")
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]  # after what is left out of a run directory that may be a stranger's
    assert line.startswith("--page '0.0.0.0:80': the page has no TLS")


def test_the_urls_of_pages_are_printed_and_renewed(
    ended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for option in ("--url", "--renew-url"):
        none = called(main, str(ended), option)
        assert none.returncode == 1
        assert none.stderr.splitlines()[-1].startswith(f"no page shows {RUN} now")
    page = url_of_watch(find_run(str(ended)))
    url = page.write("http://127.0.0.1:8765")
    assert called(main, str(ended), "--url").stdout == f"{url}\n"
    renewed = called(main, str(ended), "--renew-url").stdout.strip()
    assert renewed.startswith("http://127.0.0.1:8765/#token=")
    assert renewed.rpartition("=")[2] == page.secret() != url.rpartition("=")[2]
    page.path.chmod(0o644)
    told = called(main, str(ended), "--url")
    assert (told.returncode, "others may read it" in told.stderr) == (1, True)


def test_a_run_that_does_not_exist_or_has_no_log_is_named(tmp_path: Path) -> None:
    assert called(main, "nobody", "--time", cwd=tmp_path).returncode == 2
    (tmp_path / "bus.url").write_text("")
    done = called(main, str(tmp_path), "--time")
    assert (done.returncode, "has no log" in done.stderr) == (1, True)
