"""Sentence-transformers models: two tiny ones made from configurations, saved, and loaded through the same function as real ones."""
import subprocess
import sys

import numpy as np
import pytest
import torch
from embed_contract import check, make_items

from cirkit.embed import sentence
from cirkit.embed.dual import END, PAD, START, clip_config, train_tokenizer
from cirkit.embed.protocol import Item
from cirkit.errors import CirkitError
from cirkit.io import read_image, write_image


def test_without_the_extra_the_error_names_it(monkeypatch, tmp_path):
    (tmp_path/"config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(CirkitError, match=r"pip install 'cirkit\[sentence\]'") as e: sentence.load("mine", folder=tmp_path)
    assert "\n" not in str(e.value)


def test_importing_needs_neither_the_library_nor_torch():
    code = "import sys, cirkit.embed.sentence; sys.exit(bool({'torch', 'sentence_transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("revision", [None, "main", "v1.0", "abc123", "../../etc", "g"*40])
def test_only_a_commit_pins_a_model(revision):
    with pytest.raises(CirkitError, match="is no commit"): sentence.load("org/name", revision=revision)


@pytest.fixture(scope="session")
def library(): return pytest.importorskip("sentence_transformers", reason="needs the extra 'sentence'")


def marks(tokenizer, pairs):
    "Frame texts with a start and an end mark."
    from tokenizers.processors import TemplateProcessing
    (s, start), (e, end) = pairs
    tokenizer.post_processor = TemplateProcessing(single=f"{s} $A {e}", special_tokens=[(s, start), (e, end)])


def image_processor():
    from transformers import CLIPImageProcessorPil
    return CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})


@pytest.fixture(scope="session")
def clip(library, tmp_path_factory):
    "A tiny CLIP as transformers saves it: text and image, never together."
    from transformers import CLIPModel, CLIPProcessor, PreTrainedTokenizerFast
    folder, words = tmp_path_factory.mktemp("clip"), train_tokenizer(["a red dog", "two blue cats that is in the picture", "find this photo"]*2, 140)
    s, e, p = (words.id_to_token(i) for i in (START, END, PAD))
    marks(words, [(s, START), (e, END)])
    torch.manual_seed(0)
    CLIPModel(clip_config(words.get_vocab_size(), image=32, patch=8, width=32, layers=2, heads=2, text_width=32, text_layers=2, length=48)).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token=s, eos_token=e, pad_token=p, model_max_length=48)
    CLIPProcessor(image_processor(), tokenizer).save_pretrained(folder)
    return folder


TEMPLATE = ("{% for m in messages %}{{m.role}}: {% if m.content is string %}{{m.content}}{% else %}{% for c in m.content %}"
            "{% if c.type == 'image' %}<image>\n{% elif c.type == 'text' %}{{c.text}}{% endif %}{% endfor %}{% endif %}</s>{% endfor %}")

@pytest.fixture(scope="session")
def llava(library, tmp_path_factory):
    "A tiny LLaVA with last-token pooling as sentence-transformers saves it: text, image and both."
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast
    plain, folder = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("llava")
    letters = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="</s>", padding_side="left", model_max_length=200)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    pad, end, image = (tokenizer.convert_tokens_to_ids(t) for t in ("<pad>", "</s>", "<image>"))
    small = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    torch.manual_seed(0)
    config = LlavaConfig(text_config=dict(model_type="llama", vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=256, pad_token_id=pad,
                                          bos_token_id=None, eos_token_id=end, initializer_range=.5, **small),
                         vision_config=dict(model_type="clip_vision_model", image_size=32, patch_size=8, projection_dim=32, **small),
                         image_token_index=image, vision_feature_layer=-1)
    LlavaForConditionalGeneration(config).save_pretrained(plain)
    LlavaProcessor(image_processor(), tokenizer, patch_size=8, vision_feature_select_strategy="default", chat_template=TEMPLATE,
                   num_additional_image_tokens=1).save_pretrained(plain)
    modules = [Transformer(str(plain)), Pooling(32, pooling_mode="lasttoken")]
    library.SentenceTransformer(modules=modules, device="cpu", prompts={"query": "find it: ", "document": ""}).save_pretrained(str(folder))
    return folder


def load(folder, **options): return sentence.load("tiny", folder=folder, device="cpu", **options)


# what every embedder must do

def test_contract_of_clip_added_up(clip, tmp_path): check(lambda: load(clip, fusion="sum"), tmp_path)

def test_contract_of_llava(llava, tmp_path): check(lambda: load(llava), tmp_path)

def test_contract_of_llava_with_the_text_first(llava, tmp_path): check(lambda: load(llava, fusion="text-image"), tmp_path)

def test_contract_of_llava_added_up(llava, tmp_path): check(lambda: load(llava, fusion="sum"), tmp_path)


# the vectors are the library's own

def test_another_version_is_refused(clip, monkeypatch):
    monkeypatch.setattr(sentence, "version", lambda name: "5.4.0")
    with pytest.raises(CirkitError, match=r"needs sentence-transformers >=6.1,<7, 5.4.0 is installed; pip install"): load(clip)


def unit(v): return v/np.linalg.norm(v, axis=-1, keepdims=True)

def test_clip_added_up_by_hand(clip, tmp_path):
    from transformers import CLIPModel, CLIPProcessor
    item, model, processor = make_items(tmp_path)[0], CLIPModel.from_pretrained(clip).eval(), CLIPProcessor.from_pretrained(clip)
    with torch.no_grad():
        features = (model.get_text_features(**processor(text=[item.text], return_tensors="pt")),
                    model.get_image_features(**processor(images=[read_image(item.images[0])], return_tensors="pt")))
    text, image = (unit(getattr(f, "pooler_output", f).numpy()) for f in features)
    ours = load(clip, fusion="sum")
    for modality, hand in (("text", text), ("image", image), ("composed", unit(text + image))):
        np.testing.assert_allclose(ours.encode([item], "query", modality), hand, atol=1e-5, err_msg=modality)


def test_llava_is_fed_together(library, llava, tmp_path):
    item, plain = make_items(tmp_path)[0], library.SentenceTransformer(str(llava), device="cpu")
    both = {"image": sentence.picture(item, item.images[0]), "text": item.text}
    ours, other = load(llava), load(llava, fusion="text-image")
    np.testing.assert_allclose(ours.encode([item], "query", "composed"), unit(plain.encode_query([both])), atol=1e-5)
    np.testing.assert_allclose(ours.encode([item], "target", "composed"), unit(plain.encode_document([both])), atol=1e-5)
    assert np.abs(ours.encode([item], "query", "composed") - ours.encode([item], "target", "composed")).max() > 1e-3    # the prompt
    turned = unit(plain.encode_query([dict(reversed(both.items()))]))
    np.testing.assert_allclose(other.encode([item], "query", "composed"), turned, atol=1e-5)
    assert np.abs(turned - ours.encode([item], "query", "composed")).max() > 1e-3 and other.fingerprint() != ours.fingerprint()


def test_prompts_are_the_users_if_given(llava, tmp_path):
    item = make_items(tmp_path)[0]
    own, other, none = load(llava), load(llava, prompts={"query": "look for: ", "document": ""}), load(llava, prompts={"query": "", "document": ""})
    assert len({str(m.fingerprint()) for m in (own, other, none)}) == 3
    assert np.abs(own.encode([item], "query", "text") - other.encode([item], "query", "text")).max() > 1e-3
    black = load(llava, absent="black")                      # CIRCUS: without the text the prompt goes too
    np.testing.assert_allclose(black.encode([item], "query", "image"), none.encode([item], "query", "image"), atol=1e-6)


def test_a_text_is_never_taken_for_a_file(library, llava, tmp_path):
    write_image(tmp_path/"dog.png", np.zeros((40, 40, 3), np.uint8))
    text = str(tmp_path/"dog.png")
    plain = library.SentenceTransformer(str(llava), device="cpu").encode_document([{"text": text}])
    np.testing.assert_allclose(load(llava).encode([Item("x", (), text)], "target", "text"), unit(plain), atol=1e-6)


# errors

def test_text_may_be_cut_but_image_tokens_never(llava, tmp_path):
    image, long = make_items(tmp_path)[0].images, "a red dog "*40
    ours = load(llava)
    cut = ours.encode([Item("x", image, long + "a"), Item("y", image, long + "b")], "query", "composed")
    np.testing.assert_array_equal(*cut)                      # the library's way, at `max_length`
    assert ours.fingerprint()["max_length"] == 200
    with pytest.raises(CirkitError, match=r"model 'tiny' cannot encode 1 inputs like \['image', 'text'\].*image.*token") as e:
        load(llava, fusion="text-image").encode([Item("x", image, long)], "query", "composed")
    assert "\n" not in str(e.value)


def test_what_a_model_cannot_take_is_said(clip, tmp_path):
    items = make_items(tmp_path)
    with pytest.raises(CirkitError, match="does not take image and text together.*fusion='sum'"): load(clip).encode(items, "query", "composed")
    assert load(clip).encode(items[:1], "query", "image").shape == (1, 128)
    with pytest.raises(CirkitError, match="unknown fusion 'both'"): load(clip, fusion="both")
    with pytest.raises(CirkitError, match="unknown convention"): load(clip, absent="none")


def test_a_text_only_model(library, tmp_path):
    from sentence_transformers.sentence_transformer.modules import Pooling
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
    words = train_tokenizer(["a red dog", "cats"]*2, 140)
    s, e, p = (words.id_to_token(i) for i in (START, END, PAD))
    marks(words, [(s, START), (e, END)])
    plain = tmp_path/"plain"
    BertModel(BertConfig(vocab_size=words.get_vocab_size(), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)).save_pretrained(plain)
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token=s, eos_token=e, pad_token=p, model_max_length=32).save_pretrained(plain)
    from sentence_transformers.base.modules import Transformer
    library.SentenceTransformer(modules=[Transformer(str(plain)), Pooling(32)], device="cpu").save_pretrained(str(tmp_path/"bert"))
    model, items = load(tmp_path/"bert", fusion="sum"), make_items(tmp_path)
    assert model.encode(items, "query", "text").shape == (5, 32)
    with pytest.raises(CirkitError, match="model 'tiny' takes no images, it takes text"): model.encode(items, "query", "composed")


def test_a_folder_that_is_no_model_is_one_line(library, tmp_path):
    with pytest.raises(CirkitError, match="no model is there"): load(tmp_path)
    with pytest.raises(CirkitError, match="no model is there"): load(tmp_path/"nowhere")
    (tmp_path/"config.json").write_text("{}")
    with pytest.raises(CirkitError, match="cannot be loaded from") as e: load(tmp_path)
    assert "\n" not in str(e.value) and len(str(e.value)) < 600


def test_the_fingerprint_follows_the_files(llava, clip, tmp_path):
    import shutil
    shutil.copytree(llava, tmp_path/"copy")
    assert load(tmp_path/"copy").fingerprint() == load(llava).fingerprint()
    (tmp_path/"copy"/"README.md").write_text("another card")
    assert load(tmp_path/"copy").fingerprint() == load(llava).fingerprint()
    path = tmp_path/"copy"/"model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert load(tmp_path/"copy").fingerprint() != load(llava).fingerprint()
    assert load(llava, dtype="bfloat16").fingerprint()["dtype"] == "bfloat16" and load(llava).fingerprint()["dtype"] == "float32"
