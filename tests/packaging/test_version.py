"""The commit that is recorded beside results."""

import shutil
import subprocess
from importlib import util

from loco_ext import version


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", *identity, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def commit_of(file):
    """Return the commit according to a copy of the module in another folder."""
    spec = util.spec_from_file_location("copied_version", file)
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.commit()


def test_the_commit_is_that_of_a_checkout_and_elsewhere_the_version(tmp_path):
    file = tmp_path / "installed" / "version.py"
    file.parent.mkdir()
    shutil.copy(version.__file__, file)
    assert commit_of(file) == version.__version__
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "of someone else")
    assert commit_of(file) == version.__version__  # the repository around it is another's
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "of this package")
    assert commit_of(file) == git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "untracked").touch()
    assert commit_of(file) == git(tmp_path, "rev-parse", "HEAD")
    with file.open("a") as written:
        written.write("# changed\n")
    assert commit_of(file) == git(tmp_path, "rev-parse", "HEAD") + "-dirty"
