"""No file can make the package run something: what its sources call, and what happens to files with a purpose."""

import ast
import io
import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

import naju
from naju.lm.export import read_model
from naju.lm.sharded_checkpoint import METADATA, PlainReader
from naju.mixers.state import State
from naju.tasks.lra import image
from naju.tasks.lra.files import DamagedDataError, PlainUnpickler
from naju.training.checkpoint import read_checkpoint

SOURCE = Path(naju.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
# The two places where a pickle is read, each by an unpickler that builds a short list of classes and no others.
UNPICKLERS = {"tasks/lra/files.py": "PlainUnpickler", "lm/sharded_checkpoint.py": "_MetadataUnpickler"}
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
RUNS_CODE = {"eval", "exec", "compile", "__import__"}
LOADS = {"pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open", "dill.load"}
LOADS |= {"joblib.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.hub.load", "os.system", "os.popen"}
LOADS |= {"jsonpickle.decode", "shutil.unpack_archive", "tarfile.TarFile.extractall", "tempfile.mktemp"}


def dotted(node):
    """`a.b.c` of a name or an attribute."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def keyword(call, name):
    return next((word.value for word in call.keywords if word.arg == name), None)


def is_constant(node, value):
    return isinstance(node, ast.Constant) and node.value is value


def dangers(source):
    """Every call that may run what a file says, and why."""
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = dotted(call.func)
        if name in RUNS_CODE or name in LOADS:
            yield name
        if name.rsplit(".", 1)[-1] in ("extract", "extractall", "unpack_archive"):
            yield f"{name}, which writes where an archive says"
        if name == "torch.load" and not is_constant(keyword(call, "weights_only"), True):
            yield "torch.load without weights_only=True"
        if name in ("np.load", "numpy.load") and not is_constant(keyword(call, "allow_pickle"), False):
            yield f"{name} without allow_pickle=False"
        if keyword(call, "shell") is not None and not is_constant(keyword(call, "shell"), False):
            yield f"{name} with a shell"
        if keyword(call, "trust_remote_code") is not None:
            yield f"{name} with trust_remote_code"
        if (
            name.endswith(".from_pretrained")
            and "folder" in ast.dump(call)
            and keyword(call, "use_safetensors") is None
        ):
            yield f"{name} that may read a pickle"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_source_calls_what_runs_a_files_content(file):
    assert list(dangers(file.read_text())) == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_pickle_is_imported_in_two_places_only_and_subclassed_there(file):
    tree, name = ast.parse(file.read_text()), file.relative_to(SOURCE).as_posix()
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.name for node in imports for alias in node.names} | {
        getattr(node, "module", "") for node in imports
    }
    assert bool(modules & {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}) == (
        name in UNPICKLERS
    )
    if name in UNPICKLERS:
        made = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == UNPICKLERS[name]]
        assert "find_class" in {part.name for part in made[0].body if isinstance(part, ast.FunctionDef)}


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "pickle.loads(x)",
        "np.load(p)",
        "np.load(p, allow_pickle=True)",
        "yaml.load(x)",
        "eval(x)",
        "subprocess.run(x, shell=True)",
        "archive.extractall(p)",
        "AutoModel.from_pretrained(folder)",
        "f(x, trust_remote_code=True)",
    ],
)
def test_the_test_sees_every_danger(source):
    assert list(dangers(source))


class Evil:
    """What unpickling would run."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def evil(tmp_path):
    """A pickle, and the folder that appears where it is run."""
    mark = tmp_path / "it ran"
    content = pickle.dumps(Evil(mark))
    pickle.loads(content)
    assert mark.is_dir()
    mark.rmdir()
    return content, mark


READERS = {
    "state": State.load,
    "checkpoint": read_checkpoint,
    "pictures": lambda path: PlainUnpickler(io.BytesIO(path.read_bytes())).load(),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_pickle_in_place_of_a_file_is_not_run(reader, evil, tmp_path):
    content, mark = evil
    (tmp_path / "file").write_bytes(content)
    with pytest.raises((ValueError, pickle.UnpicklingError)):
        reader(tmp_path / "file")
    assert not mark.exists()


def test_pickled_weights_are_not_run(evil, tmp_path):
    content, mark = evil
    (tmp_path / "config.json").write_text('{"model_type": "naju", "vocab_size": 7, "d_model": 8, "n_layers": 1}')
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises((ValueError, OSError)):
        read_model(tmp_path)
    assert not mark.exists()


def test_no_picture_that_was_not_published_reaches_the_unpickler(evil, tmp_path):
    content, mark = evil
    folder = tmp_path / image.BATCHES
    folder.mkdir()
    for name in (*image.FILES["train"], *image.FILES["test"]):
        (folder / name).write_bytes(content)
    with pytest.raises(DamagedDataError, match="differs from the published data"):
        image.read(tmp_path)
    assert not mark.exists()


@pytest.fixture
def sharded(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a checkpoint without a process group
        save({"model.a": torch.zeros(2, 3), "loop.b": torch.tensor(3)}, checkpoint_id=tmp_path / "step")
    return tmp_path / "step"


def test_a_checkpoints_metadata_can_only_describe_tensors(sharded, evil):
    content, mark = evil
    assert set(PlainReader(sharded).read_metadata().state_dict_metadata) == {"model.a", "loop.b"}
    (sharded / METADATA).write_bytes(content)
    with pytest.raises(ValueError, match=r"asks for .*mkdir, which a checkpoint has no use for"):
        PlainReader(sharded).read_metadata()
    assert not mark.exists()


@pytest.mark.parametrize("place", ["../outside", "/etc/passwd", "a/b"])
def test_a_checkpoints_metadata_cannot_name_a_file_elsewhere(sharded, place):
    metadata = PlainReader(sharded).read_metadata()
    for stored in metadata.storage_data.values():
        stored.relative_path = place
    (sharded / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="names a file outside its folder"):
        PlainReader(sharded).read_metadata()
