"""The steps of the images, carried out one by one in a Debian tree."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from examples.demo_service import free_port
from tests.infra.image_steps import CHECKOUT, Image, make_base, read_steps, run_in

IMAGES = CHECKOUT / "infra" / "images"

# Starts Prefect's server, and prints the status of its page.
PREFECT_PAGE = """
import subprocess, sys, time, urllib.request
port = sys.argv[1]
server = subprocess.Popen(["prefect", "server", "start", "--host", "127.0.0.1", "--port", port])
try:
    ends_at = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/health", timeout=5)
            break
        except OSError:
            assert time.monotonic() < ends_at and server.poll() is None
            time.sleep(1)
    try:
        print(urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10).status)
    except urllib.error.HTTPError as error:
        print(error.code)
finally:
    server.terminate()
    server.wait(60)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("base")
    yield make_base(folder / "tree")
    shutil.rmtree(folder)


@pytest.fixture
def image(base: Path, tmp_path: Path) -> Iterator[Image]:
    yield Image(tmp_path, base)
    shutil.rmtree(tmp_path)


def test_images_exclude_what_is_not_source_from_their_context() -> None:
    excluded = (CHECKOUT / ".dockerignore").read_text().split()
    assert {".git", ".venv", ".setup", "**/node_modules"} <= set(excluded)
    assert not any("static" in one for one in excluded), "the built page belongs to the image"
    for dockerfile in IMAGES.glob("*.Dockerfile"):
        assert ("COPY", ". /src") in read_steps(dockerfile)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_server_image_has_the_commands_the_page_and_slurm(image: Image) -> None:
    image.build(IMAGES / "server.Dockerfile")
    assert image.start[:2] == ("tini", "--")
    assert "supervise" in image.run_start()
    # Without the site's slurm.conf, Slurm's commands do nothing.
    assert "/sbatch" in run_in(image.tree, ["sh", "-c", "command -v sbatch"])
    page = "import holdfast.api as a, os; print(*os.listdir(a.__path__[0] + '/static'))"
    assert "index.html" in run_in(image.tree, ["python", "-c", page])
    absent = "import importlib.util as u; print(u.find_spec('torch'))"
    assert run_in(image.tree, ["python", "-c", absent]).strip() == "None"
    # The account cannot write into the installed packages, where Prefect puts its page otherwise.
    assert image.run_python(PREFECT_PAGE, str(free_port())).split()[-1] == "200"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_trainer_image_imports_torch_and_neither_prefect_nor_sql(image: Image) -> None:
    image.build(IMAGES / "trainer.Dockerfile")
    assert image.run_start().startswith("2.")
    names = "[u.find_spec(n) for n in ('prefect', 'sqlalchemy')]"
    absent = f"import importlib.util as u; print({names})"
    assert run_in(image.tree, ["python", "-c", absent]).strip() == "[None, None]"
