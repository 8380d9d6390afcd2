"Editors and detectors of the real classes, tiny: same bytes alone and in any company, faults, and whole runs by a file."
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import time
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("diffusers", reason="needs the gen extra")
import diffusers
import torch
import transformers
from PIL import Image
from click.testing import CliRunner
from openai_stub import Stub

import tiny_models
import tiny_pipelines
from cirkit.check import check_folder
from cirkit.errors import CirkitError
from cirkit.io import read_json, read_jsonl, write_image
from cirkit.paths import data_dir
from cirkit.profiles import profile
from cirkit.report.cli import cli
from cirkit.synth import backends, detector, funnel, screens
from cirkit.synth.diffusers import LocalEditor, load
from cirkit.synth.interfaces import Aside, EditJob, Picture, Proposal
from cirkit.synth.pipeline import build

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
diffusers.utils.logging.disable_progress_bar()
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")   # of diffusers' schedulers
TINY = dict(device="cpu", dtype="fp32", steps=2)
MAKES = {"pix2pix": tiny_pipelines.pix2pix, "inpaint": tiny_pipelines.inpaint, "qwen": tiny_pipelines.qwen_image}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("editors")
    return {n: tiny_pipelines.save(m, root/n) for n, m in MAKES.items()} | {n: tiny_pipelines.save_detector(getattr(tiny_pipelines, n), root/n) for n in ("owl", "grounding_dino")}


def editor(folders, name, **options):
    found = dict(detector=str(folders["owl"]), threshold=0.) if name == "inpaint" else {}
    return load(str(folders[name]), **TINY | found | options)


def job(n, *changes, size=64):
    image = np.random.default_rng(n).integers(0, 256, (size, size, 3), np.uint8)
    return EditJob(f"s{n}-0", Picture(f"s{n}", f"s{n}", image), tuple(Proposal("color", c, {"target": "door"}) for c in changes), size, 10**18 + n)
JOBS = [job(0, "Paint it red."), job(1, "Make it old.", "Make it tall."), job(2, "Turn it.")]


@pytest.mark.parametrize("name", MAKES)
def test_an_image_depends_on_nothing_but_its_item(folders, name):
    made = editor(folders, name).edit(JOBS)
    assert [(p.id, p.source, p.pixels.shape, p.pixels.dtype) for p in made] == [(j.id, j.reference.source, (64, 64, 3), np.uint8) for j in JOBS]
    again = editor(folders, name, batch=3)
    for n in (2, 0): np.testing.assert_array_equal(again.edit([JOBS[n]])[0].pixels, made[n].pixels)
    np.testing.assert_array_equal(again.edit(JOBS[::-1])[1].pixels, made[1].pixels)
    assert (again.edit([replace(JOBS[0], seed=5)])[0].pixels != made[0].pixels).any()
    assert (again.edit([replace(JOBS[0], proposals=JOBS[2].proposals)])[0].pixels != made[0].pixels).any()


@pytest.mark.parametrize("name", MAKES)
def test_several_a_call_are_within_a_grey_level(folders, name):
    "Qwen's pipeline takes one a call, whatever is asked for: there the bytes are the same."
    one, many = editor(folders, name), editor(folders, name, reproducible=False, batch=4)
    worst = max(int(np.abs(a.pixels.astype(int) - b.pixels).max()) for a, b in zip(one.edit(JOBS), many.edit(JOBS)))
    assert worst <= (0 if name == "qwen" else 1) and many.settings["batch"] == (1 if name == "qwen" else 4)


def test_qwen_sees_its_reference_on_the_grid_of_its_result(folders):
    "Else the picture is shifted or zoomed; the library's own way is one megapixel, whatever the size of the result."
    made, grids = editor(folders, "qwen"), []
    made.pipe.transformer.register_forward_pre_hook(lambda m, args, kwargs: grids.append(kwargs["img_shapes"]), with_kwargs=True)
    for size in (32, 96): assert made.edit([job(0, "Paint it.", size=size)])[0].pixels.shape == (size, size, 3)
    assert {str(g) for g in grids} == {str([[(1, 2, 2), (1, 2, 2)]]), str([[(1, 6, 6), (1, 6, 6)]])}


def test_the_library_by_hand_gives_the_same(folders):
    "InstructPix2Pix, as its documentation calls it."
    pipe = diffusers.StableDiffusionInstructPix2PixPipeline.from_pretrained(folders["pix2pix"])
    pipe.set_progress_bar_config(disable=True)
    theirs = pipe("Paint it red.", Image.fromarray(JOBS[0].reference.pixels), num_inference_steps=2, generator=torch.Generator().manual_seed(10**18)).images[0]
    np.testing.assert_array_equal(editor(folders, "pix2pix").edit(JOBS[:1])[0].pixels, np.asarray(theirs))


def test_inpainting_repaints_the_box_alone(folders, monkeypatch):
    made, seen = editor(folders, "inpaint", strength=1.), []
    monkeypatch.setattr(made.detector, "boxes", lambda image, name: seen.append(name) or np.array([[0, 0, 32, 64]]))
    left = made.edit(JOBS[:1])[0].pixels
    monkeypatch.setattr(made.detector, "boxes", lambda image, name: np.array([[32, 0, 64, 64]]))
    assert seen == ["door"] and (made.edit(JOBS[:1])[0].pixels != left).any()
    scene = replace(JOBS[0], proposals=(Proposal("weather", "Let it snow.", {"target": "scene"}),))
    bare = replace(JOBS[0], proposals=(Proposal("color", "Paint it.", None),))
    assert [made.edit([j])[0] for j in (scene, bare)] == [Aside("nothing to repaint", "Let it snow."), Aside("nothing to repaint", "Paint it.")]
    still = replace(JOBS[0], proposals=(Proposal("nothing", "change nothing"),))
    assert made.passes(still)[0].mask.max() == 0 and made.edit([still])[0].pixels.shape == (64, 64, 3)


@pytest.mark.parametrize("name", ["owl", "grounding_dino"])
def test_detectors_find_boxes_inside(folders, name):
    image = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    found = detector.load(str(folders[name]), threshold=0., device="cpu")
    boxes = found.boxes(image, "wooden door")
    assert len(boxes) and (boxes >= 0).all() and (boxes[:, 2:] <= (96, 64)).all() and (boxes[:, :2] < boxes[:, 2:]).all()
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(found)).boxes(image, "wooden door"), boxes)
    assert len(detector.load(str(folders[name]), threshold=1., device="cpu").boxes(image, "door")) == 0


def test_a_filter_counts_what_a_detector_finds(folders):
    "Its boxes mean nothing, but the same image has as many."
    image, other = (np.random.default_rng(n).integers(0, 256, (64, 64, 3), np.uint8) for n in (0, 1))
    same = screens.faces(str(folders["owl"]), threshold=.4, device="cpu")
    counts = [len(screens.apart(detector.load(str(folders["owl"]), threshold=.4, device="cpu").boxes(i, "human face"))) for i in (image, other)]
    assert same(image, image) == "" and same(image, other) == ("" if counts[0] == counts[1] else "another number of human face")
    assert screens.faces(str(folders["owl"]), most=counts[0] - 1, threshold=.4, device="cpu")(image) == f"more than {counts[0] - 1} of human face"


def test_what_a_safety_checker_flags_is_set_aside(tmp_path):
    folder = tiny_pipelines.save(lambda: tiny_pipelines.pix2pix(checked=True), tmp_path/"checked")
    made = load(str(folder), **TINY, reproducible=False)
    made.pipe.safety_checker.concept_embeds_weights.data[:] = 1.     # nothing is near to a concept
    made.pipe.safety_checker.special_care_embeds_weights.data[:] = 1.
    made.pipe.safety_checker.forward = lambda clip_input, images: (images, [n == 1 for n in range(len(images))])
    found = made.edit([JOBS[0], JOBS[2], job(3, "Hide it.")])
    assert found[1] == Aside("flagged as unsafe") and found[0].pixels.shape == found[2].pixels.shape == (64, 64, 3)


def test_black_and_misshapen_images_are_set_aside(folders, monkeypatch):
    made = editor(folders, "pix2pix")
    for size, why in ((64, "black image"), (32, "wrong size")):
        monkeypatch.setattr(made, "paint", lambda *a, size=size: diffusers.pipelines.stable_diffusion.StableDiffusionPipelineOutput([Image.new("RGB", (size, size))], None))
        assert made.edit(JOBS[:1])[0].why == why
    long = job(0, "Paint the door of the house that stands behind the old tree beside the river in a very dark green.")
    assert editor(folders, "pix2pix").edit([long])[0].why == "instruction too long"


def test_it_travels_as_its_options(folders):
    made = editor(folders, "inpaint")
    sent = pickle.dumps(made)
    assert len(sent) < 2000
    again = pickle.loads(sent)
    assert again.settings == made.settings and (again.edit(JOBS[:1])[0].pixels == made.edit(JOBS[:1])[0].pixels).all()


def test_settings_name_all_that_can_change_an_image(folders):
    made = editor(folders, "pix2pix")
    for change in (dict(dtype="bf16"), dict(steps=3), dict(guidance=2.), dict(image_guidance=2), dict(reproducible=False)):
        assert editor(folders, "pix2pix", **change).settings != made.settings, change
    assert editor(folders, "pix2pix", batch=9).settings == made.settings and json.loads(json.dumps(made.settings)) == made.settings
    inpaint = editor(folders, "inpaint").settings
    assert inpaint["detector"]["class"] == "OwlViTForObjectDetection" and inpaint["scheduler"] == "EulerDiscreteScheduler" and inpaint["strength"] == .99


def test_faults_are_one_line(folders, tmp_path):
    def changed(name, **harm):
        folder = shutil.copytree(folders["pix2pix"], tmp_path/name)
        for file, content in harm.items(): (folder/{"index": "model_index.json", "unet": "unet/diffusion_pytorch_model.safetensors"}[file]).write_text(content)
        return str(folder)
    index = json.loads((folders["pix2pix"]/"model_index.json").read_text())
    bare = shutil.copytree(folders["pix2pix"], tmp_path/"bare")
    (bare/"model_index.json").unlink()
    wrong = {
        "no such folder, and no id on the hub": dict(model="/nowhere/qwen"), "no revision of it on the hub is given": dict(model="Qwen/Qwen-Image-Edit-2509"),
        "unknown pipeline 'FluxPipeline'": dict(model=changed("flux", index=json.dumps(index | {"_class_name": "FluxPipeline"}))), "cannot be loaded": dict(model=changed("junk", index="{")),
        "'bare': cannot be loaded": dict(model=str(bare)), "'cut': cannot be loaded": dict(model=changed("cut", unet="")), "batch is 0": dict(batch=0), "unknown dtype": dict(dtype="int4"),
        "strength is 0.5, but a": dict(strength=.5), "has no use for a detector": dict(detector=str(folders["owl"])), "guidance is -1": dict(guidance=-1), "dtype is 3": dict(dtype=3),
        "device 'auto' is for language models": dict(device="auto")}
    for line, change in wrong.items():
        with pytest.raises(CirkitError, match=re.escape(line)) as e: load(**dict(model=str(folders["pix2pix"])) | TINY | change)
        assert "\n" not in str(e.value)
    with pytest.raises(CirkitError, match="a clip_text_model|does not find things by name"): load(str(folders["inpaint"]), **TINY, detector=str(folders["inpaint"]/"text_encoder"))


# whole runs

CONFIG = """
licence = "CC0-1.0"
[models.eye]
{eye}
[seeds]
{seeds}
[filter]
kind = "none"
[proposer]
kind = "mllm"
model = "eye"
[editor]
kind = "diffusers"
model = "editor"
device = "cpu"
dtype = "fp32"
steps = 1
[rewriter]
kind = "mllm"
model = "eye"
[verifier]
kind = "mllm"
model = "eye"
"""


def place(folders, folder, eye, seeds='kind = "world"'):
    "A file of backends, with its models beside it."
    shutil.copytree(folders["qwen"], folder/"editor")
    (folder/"backends.toml").write_text(CONFIG.format(eye=eye, seeds=seeds))
    return folder/"backends.toml"


def test_models_that_know_nothing_set_everything_aside(folders, tmp_path):
    "`cirkit synth` on photographs with all models in this process; their prompts are cut to few words, since noise is never JSON, however long."
    rng = np.random.default_rng(0)
    for n in range(3): write_image(tmp_path/"photographs"/f"{n}.png", rng.integers(0, 256, (224, 240, 3), np.uint8))
    tiny_models.save_chat("qwen2_5_vl", tmp_path/"eye")
    prompts = shutil.copytree(data_dir()/"prompts", tmp_path/"prompts")
    for p in prompts.glob("*.md"): p.write_text(re.sub(r"max_tokens = \d+", "max_tokens = 2", p.read_text()).replace("{{taxonomy}}", "").replace("{{schema}}", "{}"))
    eye = f'kind = "transformers"\nmodel = "eye"\ndevice = "cpu"\ndtype = "fp32"\nside = 64\nprompts = "{prompts}"'
    path = place(folders, tmp_path, eye, 'kind = "photographs"\nfolder = "photographs"')
    done = CliRunner().invoke(cli, ["synth", "--profile", "smoke", "--backend", str(path), "--work", str(tmp_path/"run")])
    assert done.exit_code and "0 photographs have a set of 4 accepted images" in done.stderr and "Traceback" not in done.stderr, done.stderr
    told = read_json(tmp_path/"run"/"funnel.json")
    assert (told["seeds"], told["queries"]) == (3, 0) and sum(n for name, n in told.items() if name.startswith("set aside in propose: ") and f"{n} {name}" in done.stderr) == 3
    rows = [r for part in (tmp_path/"run"/"synth"/"propose").glob("part-*.jsonl") for r in read_jsonl(part)]
    assert len(rows) == 3 and {r["aside"] for r in rows} <= {"cut off", "no JSON object"} and all(r["raw"] for r in rows)
    assert len((tmp_path/"run"/"replies"/"eye"/"replies.jsonl").read_text().splitlines()) == 9    # three tries each


SIZES = replace(profile("smoke"), seeds=6, per_simple=1, complex=1, set_images=8, distractors=0, size=32)

def served(stub, folders, folder):
    "A backend that asks the stub and edits here."
    if not (folder/"backends.toml").exists(): place(folders, folder, f'kind = "openai"\nbase = "{stub.base}"\nmodel = "eye"')
    b = backends.load(folder/"backends.toml", folder/"run")
    assert b.multiple == 32 and b.alone and not b.waits
    return replace(b, subcategories=("color",))

def made(stub, folders, folder): return build(folder/"run", SIZES, served(stub, folders, folder), workers=1, progress=False)
def contents(folder): return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted((folder/"run").rglob("*")) if p.is_file() and not {"replies", "edits"} & set(p.parts)}


def test_a_run_that_is_killed_goes_on_to_the_same_bytes(folders, tmp_path, monkeypatch):
    "A benchmark from served words and images of this machine; killed among its images, where those that are there are not made again."
    monkeypatch.setattr("cirkit.synth.stages.BLOCK", 4)
    stub = Stub()
    try:
        bench = made(stub, folders, tmp_path/"whole")
        assert len(bench.queries) == 2 and not check_folder(tmp_path/"whole"/"run"/"benchmark")
        images = funnel.counts(tmp_path/"whole"/"run")["edited images"]
        (tmp_path/"killed").mkdir()
        place(folders, tmp_path/"killed", f'kind = "openai"\nbase = "{stub.base}"\nmodel = "eye"')
        kept = tmp_path/"killed"/"run"/"edits"
        child = multiprocessing.get_context("fork").Process(target=made, args=(stub, folders, tmp_path/"killed"))
        child.start()
        while child.is_alive() and len(list(kept.glob("*.png"))) < 5: time.sleep(.01)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        before, calls = {p.name for p in kept.glob("*.png")}, []
        make = LocalEditor._make
        monkeypatch.setattr(LocalEditor, "_make", lambda self, jobs: calls.append(jobs) or make(self, jobs))
        made(stub, folders, tmp_path/"killed")
    finally: stub.close()
    assert contents(tmp_path/"killed") == contents(tmp_path/"whole")
    assert len(before) >= 5 and len(calls) <= images - 5
