"Multimodal language models as embedders: every architecture under the contract, against transformers' own path, and its faults."
import json
import pickle
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tiny_models
from cirkit.embed.catalogue import MODELS as CATALOGUE
from cirkit.embed.mllm import load
from cirkit.embed.pooling import last_attended
from cirkit.embed.protocol import Item, present
from cirkit.errors import CirkitError
from cirkit.io import read_image
from embed_contract import check, make_items

transformers.utils.logging.disable_progress_bar()
GOLDEN = Path(__file__).parent/"golden"/"mllm.json"
BUDGET = {"image_tokens": (4, 24, 8)}
MODELS = {   # architecture -> the options that a published model of it has
    "qwen2_vl": dict(template="gme", pooling="last position", query_instruction="Find it.", **BUDGET),
    "qwen2_5_vl": dict(template="lamra", pooling="before <emb>", **BUDGET),
    "qwen3_vl": dict(template="qwen3-vl", **BUDGET),
    "qwen2_5_omni_thinker": dict(template="e5-omni", pooling="last position", **BUDGET),
    "llava_next": dict(template="bge-vl-mllm", pooling="last position", resize=(48, 48), query_instruction="Find it."),
    "llava_next_llama3": dict(template="e5-v", pooling="last position"),
    "llava_onevision": dict(template="unime-v2-llava-ov", pooling="last position", query_instruction="Find it."),
    "mllama": dict(template="mme5"),
    "mm_embed": dict(template="mm-embed", pooling="mean without the instruction", query_instruction="Find it."),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    "A model folder for each architecture."
    root = tmp_path_factory.mktemp("models")
    return {a: tiny_models.save(a, root/a) for a in MODELS}


@pytest.fixture(scope="module")
def items(tmp_path_factory): return make_items(tmp_path_factory.mktemp("images"))


def make(folders, architecture, **options):
    "The tiny model, loaded as a published one is."
    return load("tiny", folders[architecture], **MODELS[architecture] | options)


@pytest.mark.parametrize("architecture", MODELS)
def test_contract(folders, architecture, tmp_path): check(lambda **o: make(folders, architecture, **o), tmp_path)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("architecture", MODELS)
def test_a_batch_may_hold_anything(folders, items, architecture, padding):
    "Rows with two, one and no images, long and short, give what they give alone."
    mixed = [items[1], *(present(i, "text") for i in items[2:4]), items[0], *(present(i, "image") for i in items[2:4])]
    mixed = [Item(f"m{n}", i.images, i.text) for n, i in enumerate(mixed)]
    model = make(folders, architecture, padding=padding)
    prepared = [model.preparer(i, "query") for i in mixed]
    together = model.run(prepared)
    alone = np.concatenate([model.run([p]) for p in prepared])
    np.testing.assert_allclose(together, alone, atol=1e-5)
    shared = model.vision(prepared)
    assert len(shared) == sum(len(i.images) for i in mixed)
    np.testing.assert_allclose(model.run(prepared, shared), together, atol=1e-5)
    one_by_one = [f for p in prepared for f in model.vision([p])]
    for a, b in zip(shared, one_by_one): torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def processor(architecture, folder):
    "The library's processor; those for Qwen want torchvision for their videos, so they are made without that part."
    tok, pixels = transformers.AutoTokenizer.from_pretrained(folder), transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    if architecture.startswith("llava_next"):
        return transformers.LlavaNextProcessor(pixels, tok, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1)
    if architecture == "mllama": return transformers.MllamaProcessor(pixels, tok)
    if architecture == "llava_onevision":
        class Still(transformers.LlavaOnevisionProcessor):
            def __init__(self): self.tokenizer, self.image_processor, self.chat_template, self.num_image_tokens = tok, pixels, None, 16
            get_attributes = classmethod(lambda cls: ["image_processor", "tokenizer"])
        p = Still()
        p.vision_feature_select_strategy, p.vision_aspect_ratio, p.image_token, p.video_token = "full", "anyres_max_9", "<image>", "<video>"
        p.image_token_id, p.video_token_id = tok.convert_tokens_to_ids(["<image>", "<video>"])
        return p
    cls = {"qwen3_vl": "Qwen3VLProcessor"}.get(architecture, "Qwen2VLProcessor")

    class WithoutVideo(getattr(transformers, cls)):
        def __init__(self): self.tokenizer, self.image_processor, self.chat_template = tok, pixels, None
        get_attributes = classmethod(lambda cls: ["image_processor", "tokenizer"])
    p = WithoutVideo()
    p.image_token, p.video_token = ("<|IMAGE|>", "<|VIDEO|>") if "omni" in architecture else ("<|image_pad|>", "<|video_pad|>")
    p.image_token_id, p.video_token_id = tok.convert_tokens_to_ids([p.image_token, p.video_token])
    return p


@pytest.mark.parametrize("architecture", [a for a in MODELS if a != "mm_embed"])
def test_the_library_s_processor_and_model_give_the_same(folders, items, architecture):
    "Ids, pixels and hidden states, through `AutoProcessor`'s classes and the published class with its language head."
    model = make(folders, architecture, padding="right")
    whole = getattr(transformers, tiny_models.ARCHITECTURES[architecture][3]).from_pretrained(folders[architecture])
    theirs = processor(architecture, folders[architecture])
    if architecture == "qwen2_5_vl":     # LamRA's token is added to the published weights as well
        theirs.tokenizer.add_tokens(["<emb>"])
        whole.resize_token_embeddings(len(theirs.tokenizer), mean_resizing=False)
    theirs.image_processor.size = model.preparer.processor.size
    for item in items[:3]:
        images = [read_image(p) for p in item.images]
        if (size := model.preparer.settings.resize): images = [np.asarray(transformers.image_utils.PIL.Image.fromarray(i).resize(size)) for i in images]
        string, prepared = model.preparer.describe(item, "query")["text"], model.preparer(item, "query")
        given = theirs(text=[string], images=[images] if architecture in ("mllama", "llava_onevision") else images, return_tensors="pt")
        assert given["input_ids"][0].tolist() == prepared.inputs["input_ids"].tolist()
        if "omni" in architecture: given.pop("mm_token_type_ids", None)
        hidden = whole(**given, output_hidden_states=True).hidden_states[-1]
        ours = model.kind.hidden(model.model, model.to_device(model.collate([prepared])))
        end = prepared.inputs["input_ids"].tolist().index(len(theirs.tokenizer) - 1) if architecture == "qwen2_5_vl" else None   # from <emb> on nothing is read
        np.testing.assert_allclose(ours.detach().numpy()[:, :end], hidden.detach().numpy()[:, :end], atol=2e-5)


@pytest.mark.parametrize("size", [(64, 64), (16, 64), (90, 33), (7, 200), (48, 48), (63, 50)])
def test_tokens_of_tiles_are_the_network_s(folders, tmp_path, size):
    "As many placeholders as features, also where the tiles are shrunk."
    from cirkit.io import write_image
    write_image(tmp_path/"a.png", np.random.default_rng(0).integers(0, 255, (*size, 3), dtype=np.uint8))
    for architecture in ("llava_next", "llava_onevision"):
        model = make(folders, architecture, **({"resize": ()} if architecture == "llava_next" else {}))
        p = model.preparer(Item("a", (tmp_path/"a.png",)), "target")
        assert [len(f) for f in model.vision([p])] == [p.image_tokens]


def test_pooling_reads_what_it_says(folders, items):
    "The vector is the hidden state that the rule names; LamRA's is the one before <emb>."
    for architecture in ("qwen2_vl", "qwen2_5_vl"):
        model = make(folders, architecture, padding="right")
        p = model.preparer(items[0], "query")
        batch = model.collate([p])
        hidden = model.kind.hidden(model.model, batch)
        place = -1 if architecture == "qwen2_vl" else p.inputs["input_ids"].tolist().index(model.preparer.tokenizer.convert_tokens_to_ids("<emb>")) - 1
        torch.testing.assert_close(model.forward(batch), hidden[:, place])
    assert not torch.allclose(last_attended(hidden, batch["attention_mask"]), hidden[:, place])


def test_what_the_added_token_holds_does_not_matter(folders, items):
    "<emb> comes after the state that is read."
    model = make(folders, "qwen2_5_vl")
    before = model.encode(items, "query", "composed")
    with torch.no_grad(): model.model.get_input_embeddings().weight[model.preparer.tokenizer.convert_tokens_to_ids("<emb>")] += 1
    np.testing.assert_allclose(model.encode(items, "query", "composed"), before, atol=1e-6)


@pytest.mark.parametrize("architecture", MODELS)
def test_golden(folders, architecture, tmp_path):
    "Vectors of three fixed items, as they were when this was written."
    model, items = make(folders, architecture), make_items(tmp_path)[:3]
    ours = {m: model.encode(items, "query", m)[:, :6].round(4).tolist() for m in ("composed", "text", "image")}
    ours["target"] = model.encode(items, "target", "image")[:, :6].round(4).tolist()
    stored = json.loads(GOLDEN.read_text())[architecture]
    for name, v in ours.items(): np.testing.assert_allclose(v, stored[name], atol=2e-4, err_msg=name)


ENTRIES = [e for e in CATALOGUE.values() if e.adapter == "cirkit.embed.mllm:load" and e.architecture in MODELS]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
def test_every_entry_embeds(folders, items, entry):
    "A catalogue entry is all that `load` needs; only sizes are made small here."
    tiny = replace(entry, image_tokens=(4, 24, 8) if entry.image_tokens else (), resize=(48, 48) if entry.resize else ())
    model = load(tiny, folders[entry.architecture], dtype="fp32")
    assert model.id == entry.id and model.fingerprint()["template"] == entry.template
    for side, modality in (("query", "composed"), ("query", "text"), ("query", "image"), ("target", "image")):
        v = model.encode(items, side, modality)
        np.testing.assert_allclose(v, np.concatenate([model.encode([i], side, modality) for i in items]), atol=1e-5)


def test_mm_embed_pools_without_the_instruction(folders, items):
    "Another instruction of equal length changes the vector, for it is attended to; its own positions do not count."
    model = make(folders, "mm_embed")
    p = model.preparer(items[0], "query")
    batch = model.collate([p])
    hidden = model.kind.hidden(model.model, batch)
    length = len("<s>Instruct: Find it.") - 2      # a token a byte, one for <s>
    assert p.inputs["pool_mask"].tolist() == [0]*length + [1]*(len(p.inputs["input_ids"]) - length)
    torch.testing.assert_close(model.forward(batch), hidden[:, length:].mean(1))
    assert model.preparer(items[0], "target").inputs["pool_mask"].all()
    assert p.image_tokens == 17 and make(folders, "mm_embed", max_length=len(p.inputs["input_ids"]) - 16).preparer(items[0], "query").image_tokens == 17
    with pytest.raises(CirkitError, match="do not fit"): make(folders, "mm_embed", max_length=len(p.inputs["input_ids"]) - 17).preparer(items[0], "query")


def test_mm_embed_ends_with_the_end_token(folders, items, tmp_path):
    "Its configuration says whether."
    closed = tmp_path/"closed"
    closed.mkdir()
    for f in folders["mm_embed"].iterdir(): (closed/f.name).write_bytes(f.read_bytes())
    (closed/"config.json").write_text(json.dumps(json.loads((closed/"config.json").read_text()) | {"add_eos_token": True}))
    model = load("tiny", closed, **MODELS["mm_embed"])
    ids = model.preparer(items[0], "query").inputs["input_ids"].tolist()
    assert model.preparer.tokenizer.convert_ids_to_tokens([ids[0], ids[-1]]) == ["<s>", "</s>"]


def test_mm_embed_under_its_published_names(folders, items, tmp_path):
    "The authors' files name the language model's parts without a `model.` of its own."
    old = tmp_path/"old"
    old.mkdir()
    for f in folders["mm_embed"].iterdir(): (old/f.name).write_bytes(f.read_bytes())
    def name(k): return k.removeprefix("model.").replace("language_model.model.", "language_model.").replace("vision_tower.", "vision_tower.vision_model.")
    state = {name(k): v for k, v in load_file(old/"model.safetensors").items()}
    assert {"language_model.layers.0.mlp.up_proj.weight", "vision_tower.vision_model.embeddings.class_embedding", "latent_attention_model.latents", "image_newline"} <= state.keys()
    save_file(state, old/"model.safetensors", {"format": "pt"})
    same = load("tiny", old, **MODELS["mm_embed"])
    np.testing.assert_array_equal(same.encode(items, "query", "composed"), make(folders, "mm_embed").encode(items, "query", "composed"))


def test_image_order_matters(folders, items):
    for a in MODELS:
        model = make(folders, a)
        two, turned = items[1], Item("t", items[1].images[::-1], items[1].text)
        v = model.encode([two, turned], "query", "composed")
        if a != "mllama": assert np.abs(v[0] - v[1]).max() > 1e-3     # there, images are a set behind one attention


def test_describe_is_exact(folders, items):
    model = make(folders, "qwen2_vl")
    seen = model.preparer.describe(items[1], "query")
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    assert seen["text"] == (f"<|im_start|>system\nFind it.<|im_end|>\n<|im_start|>user\n{mark}{mark}cats<|im_end|>\n<|im_start|>assistant\n<|endoftext|>")
    assert [i["pixels"] for i in seen["images"]] == [[32, 32], [48, 24]] and [i["tokens"] for i in seen["images"]] == [16, 18]
    p = model.preparer(items[1], "query")
    assert seen["image_tokens"] == p.image_tokens == sum(i["tokens"] for i in seen["images"]) and all(4 <= i["tokens"] <= 24 for i in seen["images"])
    assert seen["text_tokens"] + seen["image_tokens"] == p.tokens == len(p.inputs["input_ids"])


def test_instruct_false_leaves_the_instruction_out(folders, items):
    model = make(folders, "qwen2_vl", absent="black")
    shown = present(items[0], "image", "black")
    assert "You are a helpful assistant." in model.preparer.describe(shown, "query")["text"] and "Find it." not in model.preparer.describe(shown, "query")["text"]


def test_too_long(folders, items):
    "Refused with three numbers before the forward pass; text is cut on demand, image tokens never."
    model = make(folders, "qwen2_vl", max_length=140)
    text = "a red dog, "*20 + "and no more"
    long = Item("long", items[0].images, text)
    model.model.forward = None      # nothing may reach the network
    with pytest.raises(CirkitError) as e: model.encode([long], "query", "composed")
    seen = make(folders, "qwen2_vl").preparer.describe(long, "query")
    assert f"item 'long': {seen['text_tokens']} text tokens and {seen['image_tokens']} image tokens do not fit into the limit of 140" in str(e.value)
    cut = make(folders, "qwen2_vl", max_length=140, long="cut")
    seen = cut.preparer.describe(long, "query")
    assert seen["text_tokens"] + seen["image_tokens"] == 140 and seen["text"].endswith("<|im_end|>\n<|im_start|>assistant\n<|endoftext|>")
    assert seen["cut"] + len(seen["text"].split("<|vision_end|>")[1].split("<|im_end|>")[0]) == len(text)
    with pytest.raises(CirkitError, match="do not fit into the limit of 60"):     # the words alone are too long
        make(folders, "qwen2_vl", max_length=60, long="cut").encode([long], "query", "composed")
    assert np.isfinite(cut.encode([long], "query", "composed")).all()


def test_settings_change_the_fingerprint_and_the_vectors(folders, items):
    base = make(folders, "qwen2_vl")
    v = base.encode(items, "query", "composed")
    seen = {json.dumps(base.fingerprint(), sort_keys=True)}
    changes = [dict(template="vlm2vec-v2"), dict(query_instruction="Find."), dict(image_tokens=(4, 12, 8)), dict(resize=(64, 24)), dict(round_to=16), dict(positions="sequential"),
               dict(dim=8), dict(dtype="bf16"), dict(attention="eager"), dict(max_length=512), dict(absent="black"), dict(padding="right"), dict(long="cut")]
    for change in changes:
        other = make(folders, "qwen2_vl", **change)
        seen.add(json.dumps(other.fingerprint(), sort_keys=True))
        if change.keys() & {"template", "query_instruction", "image_tokens", "resize", "round_to", "positions"}:
            assert np.abs(other.encode(items, "query", "composed") - v).max() > 1e-3, change
    assert len(seen) == len(changes) + 1
    assert make(folders, "qwen2_vl", dim=8).encode(items, "query", "composed").shape == (5, 8)
    np.testing.assert_allclose(make(folders, "qwen2_vl", attention="eager").encode(items, "query", "composed"), v, atol=1e-5)
    half = make(folders, "qwen2_vl", dtype="bfloat16").encode(items, "query", "composed")
    assert (half*v).sum(1).min() > .97


def test_names_of_old_and_new_checkpoints(folders, items, tmp_path):
    "Published Qwen2-VL files name their weights as older versions did, and so does the library when it saves; new names are read as well."
    new = tmp_path/"new"
    new.mkdir()
    for f in folders["qwen2_vl"].iterdir(): (new/f.name).write_bytes(f.read_bytes())
    state = load_file(new/"model.safetensors")
    assert {"visual.patch_embed.proj.weight", "model.embed_tokens.weight"} <= state.keys()
    def name(k): return k.replace("visual.", "model.visual.") if k.startswith("visual") else k.replace("model.", "model.language_model.")
    save_file({name(k): v for k, v in state.items()}, new/"model.safetensors", {"format": "pt"})
    same = load("tiny", new, **MODELS["qwen2_vl"])
    np.testing.assert_array_equal(same.encode(items, "query", "composed"), make(folders, "qwen2_vl").encode(items, "query", "composed"))


def test_a_whole_omni_s_folder(folders, items, tmp_path):
    "Qwen2.5-Omni's own folder holds the thinker beside other parts."
    whole = tmp_path/"omni"
    whole.mkdir()
    for f in folders["qwen2_5_omni_thinker"].iterdir(): (whole/f.name).write_bytes(f.read_bytes())
    config = json.loads((whole/"config.json").read_text())
    (whole/"config.json").write_text(json.dumps({"model_type": "qwen2_5_omni", "thinker_config": config}))
    save_file({f"thinker.{k}": v for k, v in load_file(whole/"model.safetensors").items()}, whole/"model.safetensors", {"format": "pt"})
    same = load("tiny", whole, **MODELS["qwen2_5_omni_thinker"])
    np.testing.assert_array_equal(same.encode(items, "query", "composed"), make(folders, "qwen2_5_omni_thinker").encode(items, "query", "composed"))


def test_weights_that_are_not_whole(folders, tmp_path):
    "A missing weight would be random; it stops the load."
    part = tmp_path/"part"
    part.mkdir()
    for f in folders["qwen2_vl"].iterdir(): (part/f.name).write_bytes(f.read_bytes())
    state = load_file(part/"model.safetensors")
    state.pop(next(k for k in state if "layers.1.mlp" in k))
    save_file(state, part/"model.safetensors", {"format": "pt"})
    with pytest.raises(CirkitError, match="1 weights of Qwen2VLForConditionalGeneration are missing"): load("tiny", part, **MODELS["qwen2_vl"])


def test_a_processor_from_elsewhere(folders, items, tmp_path):
    "Weights in one folder, tokenizer and image processor in another."
    bare = tmp_path/"bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"): (bare/name).write_bytes((folders["qwen2_vl"]/name).read_bytes())
    model = load("tiny", bare, processor=folders["qwen2_vl"], **MODELS["qwen2_vl"])
    np.testing.assert_array_equal(model.encode(items, "query", "composed"), make(folders, "qwen2_vl").encode(items, "query", "composed"))


def test_the_preparer_travels(folders, items):
    "Worker processes get it by pickle; it holds no weights."
    for a in MODELS:
        model = make(folders, a)
        again = pickle.loads(pickle.dumps(model.preparer))
        one, two = model.preparer(items[1], "query"), again(items[1], "query")
        assert one.inputs.keys() == two.inputs.keys() and all((one.inputs[n] == two.inputs[n]).all() for n in one.inputs)
        assert not any(isinstance(v, torch.Tensor) for v in vars(again.family).values())


def test_compiled_is_in_the_fingerprint(folders):
    plain, compiled = make(folders, "qwen2_vl"), make(folders, "qwen2_vl", compiled=True)
    assert compiled.fingerprint() == plain.fingerprint() | {"compiled": True}


def test_faults_are_one_line(folders, items, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)      # as where it is not installed
    wrong = {"no revision of org/model": dict(folder=None, template="gme"), "unknown template": dict(template="gmee"), "unknown pooling": dict(pooling="last"),
             "of 28 pixels are asked for, this model's are 8": dict(image_tokens=(4, 1280, 28)), "unknown option": dict(templates="gme"),
             "unknown dtype": dict(dtype="int8"), "unknown kind of positions": dict(positions="rope"), "marks an image with": dict(template="e5-v"),
             "is a LoRA adapter, which needs the package peft": dict(adapter=tmp_path)}
    for text, change in wrong.items():
        with pytest.raises(CirkitError, match=text) as e:
            load("org/model", **dict(folder=folders["qwen2_vl"]) | MODELS["qwen2_vl"] | change).encode(items, "query", "composed")
        assert "\n" not in str(e.value)
    with pytest.raises(CirkitError, match="no budget of image tokens"): make(folders, "llava_next", image_tokens=(4, 64, 28))
    phi = tmp_path/"phi"
    phi.mkdir()
    (phi/"config.json").write_text(json.dumps({"model_type": "phi3_v"}))
    with pytest.raises(CirkitError, match="Phi-3.5-V is not part of transformers.*trust_remote_code") as e: load("vlm2vec", phi, template="vlm2vec")
    assert "\n" not in str(e.value)


def no_config(c): c["text_config"]["hidden_size"] = -1
def no_positions(c): c["text_config"]["rope_parameters"] = "x"
def no_image(c): c["image_token_id"] = 10**9
def no_vision(c): c["vision_config"] = None

HARM = {   # file -> what is done to its content
    "config.json": [lambda d: b"{}", lambda d: b"[]", lambda d: b"", *(lambda d, f=f: changed(d, f) for f in (no_config, no_positions, no_image, no_vision))],
    "tokenizer.json": [lambda d: b"[]", lambda d: b"junk"], "preprocessor_config.json": [lambda d: b"[]", lambda d: b"\xff"],
    "model.safetensors": [lambda d: b"", lambda d: d[:len(d)//2], lambda d: b"\0"*7 + b"\x20{}"]}


def changed(data, change):
    config = json.loads(data)
    change(config)
    return json.dumps(config).encode()


@pytest.mark.parametrize("name, n", [(name, n) for name, some in HARM.items() for n in range(len(some))])
def test_files_that_make_no_sense_are_one_line(folders, tmp_path, name, n):
    shutil.copytree(folders["qwen2_vl"], tmp_path/"m")
    (tmp_path/"m"/name).write_bytes(HARM[name][n]((tmp_path/"m"/name).read_bytes()))
    with pytest.raises(CirkitError, match="tiny|config") as e: load("tiny", tmp_path/"m", **MODELS["qwen2_vl"])
    assert "\n" not in str(e.value)


def test_pixels_and_network_must_agree_on_tiles(folders, tmp_path):
    shutil.copytree(folders["llava_onevision"], tmp_path/"m")
    path = tmp_path/"m"/"preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_grid_pinpoints": [[16, 16]]}))
    with pytest.raises(CirkitError, match="image_grid_pinpoints of config.json and preprocessor_config.json differ"): load("tiny", tmp_path/"m", **MODELS["llava_onevision"])


def write_golden(root: Path):
    "Vectors for `golden/mllm.json`: run once, by hand, when a change of vectors is meant."
    folders, items, out = {a: tiny_models.save(a, root/a) for a in MODELS}, make_items(root)[:3], {}
    for a in MODELS:
        model = make(folders, a)
        out[a] = {m: model.encode(items, "query", m)[:, :6].round(4).tolist() for m in ("composed", "text", "image")}
        out[a]["target"] = model.encode(items, "target", "image")[:, :6].round(4).tolist()
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(json.loads(json.dumps(out), parse_float=lambda x: round(float(x), 4))) + "\n")
