"Language models in this process: tiny ones of the real architectures, with and without eyes; their batches, their faults."
import json
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import tiny_models
from cirkit.errors import CirkitError
from cirkit.paths import data_dir
from cirkit.synth import transformers_chat
from cirkit.synth.chat import ChatJob, Completion, Message, Turn
from cirkit.synth.interfaces import Picture
from cirkit.synth.transformers_chat import load

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
TINY = dict(device="cpu", dtype="fp32", side=48)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("chat")
    return {n: tiny_models.save_chat(n, root/n) for n in ("qwen2_5_vl", "qwen3_vl", "qwen3")}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    "cirkit's own in fewer words, and few tokens for an answer: noise is never JSON, however long."
    folder = shutil.copytree(data_dir()/"prompts", tmp_path_factory.mktemp("words")/"prompts")
    for p in folder.glob("*.md"):
        head = re.sub(r"max_tokens = \d+", "max_tokens = 6", p.read_text().partition("# ")[0])
        places = [m for m in dict.fromkeys(re.findall(r"\{\{.*?\}\}", p.read_text())) if m not in ("{{taxonomy}}", "{{schema}}")]
        p.write_text(f"{head}# System\nJudge.\n\n# User\nSay something. {' '.join(places)}\n")
    return folder


def picture(n, side=64): return Picture(f"s{n}", f"s{n}", np.random.default_rng(n).integers(0, 256, (side, side, 3), np.uint8))
def fit(n): return ChatJob(f"s{n}", "seed_fitness", (picture(n),), seed=n)
def pool(n): return ChatJob(f"s{n}", "instruction_pool", (picture(n),), seed=n)
def pair(n): return ChatJob(f"s{n}", "triplet_check", (picture(n), picture(n + 50)), {"query": f"the same in colour {n}"}, seed=n)
def wish(n): return ChatJob(f"q{n}", "rewrite_direct", (), {"changes": [f"Paint it in colour {n}."], "manner": "a short wish"}, seed=n)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_an_answer_depends_on_nothing_but_its_item(folders, prompts, name):
    chat = load(str(folders[name]), prompts=prompts, **TINY)
    jobs = [fit(0), pool(1), pair(2), pool(3), fit(4), wish(5)]
    replies = chat.ask(jobs)
    assert [r.id for r in replies] == [j.id for j in jobs] and all(r.answer is None and r.aside for r in replies)
    assert all(r.tokens_in > 100 and 0 < r.tokens_out <= 42 for r in replies)                    # 6 + 12 + 24 at most
    again = load(str(folders[name]), prompts=prompts, **TINY)
    for n in (5, 3, 0): assert again.ask([jobs[n]]) == [replies[n]]                              # another process, order and company
    assert chat.ask([replace(jobs[1], seed=77)])[0].text != replies[1].text                     # sampled: another seed, another answer
    assert chat.ask([replace(jobs[0], seed=77)])[0] == replies[0]                               # greedy


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3"])
def test_several_a_call_agree_with_one_a_call(folders, name):
    one, many = (load(str(folders[name]), reproducible=r, batch=3, **TINY) for r in (True, False))
    images = (lambda n: (picture(n, 40 + 8*n),)) if name != "qwen3" else lambda n: ()
    for warmth in (0., .7):
        turns = [Turn((Message("system", "You look."), Message("user", f"What is {'very ' * n}new?", images(n))), {}, 8, warmth, n) for n in range(3)]
        single, together = [one._call([t])[0] for t in turns], many._call(turns)
        assert [c.tokens_in for c in single] == [c.tokens_in for c in together]
        assert [c.text for c in single] == [c.text for c in together]        # equal but for rounding; a tie would have to be closer than that


def test_it_sees(folders):
    chat = load(str(folders["qwen2_5_vl"]), **TINY)
    def last(n):
        with torch.inference_mode(): return chat.model(**chat._inputs([Turn((Message("user", "What is it?", (picture(n),)),), {}, 8, 0., 0)])).logits[:, -1]
    assert torch.equal(last(0), last(0)) and (last(0) - last(1)).abs().max() > .01


def test_scores_of_a_batch_are_those_of_each_alone(folders):
    "What batches may differ by: rounding, measured."
    chat = load(str(folders["qwen2_5_vl"]), reproducible=False, **TINY)
    turns = [Turn((Message("user", f"What is {'very ' * n}new?", (picture(n),)),), {}, 8, 0., n) for n in range(3)]
    def last(some): return chat.model(**chat._inputs(some)).logits[:, -1]
    with torch.inference_mode(): torch.testing.assert_close(last(turns), torch.cat([last([t]) for t in turns]), atol=2e-5, rtol=2e-5)


def test_the_noise_samples_what_the_library_samples(folders):
    "Frequencies of the first token, beside those of the network's own distribution."
    chat = load(str(folders["qwen3"]), temperature=1.2, **TINY)
    turn = Turn((Message("user", "Say a letter."),), {}, 1, 0., 0)
    with torch.inference_mode(): scores = chat.model(**chat._inputs([turn])).logits[0, -1].float() / 1.2
    expected = scores.softmax(-1).numpy()
    turns = [replace(turn, seed=s) for s in range(600)]
    noise = transformers_chat.sampling(chat.own, 1.2, [t.seed for t in turns])
    got = noise(torch.zeros(600, 1, dtype=torch.long), scores.mul(1.2).expand(600, -1)).argmax(1).numpy()
    top = chat.own.top_k or len(expected)
    kept = np.sort(expected)[-top:].min() <= expected
    expected = np.where(kept, expected, 0) / expected[kept].sum()
    np.testing.assert_allclose(np.bincount(got, minlength=len(expected))/600, expected, atol=.09)   # over four standard errors of a half
    letters = [chat._call([t])[0].text for t in turns[:20]]
    assert letters == [chat.wording.tokenizer.decode([g], skip_special_tokens=True) for g in got[:20]]


class Says:
    "Stands in for a network's words, one after the other."
    def __init__(self, *texts): self.texts, self.asked = list(texts), []
    def __call__(self, turns):
        self.asked += turns
        return [Completion(self.texts.pop(0), "stop", 10, 3) for _ in turns]


def test_answers_are_repaired_or_set_aside(folders, tmp_path):
    chat = load(str(folders["qwen2_5_vl"]), folder=tmp_path, **TINY)
    good = json.dumps({"seen": "a field", "problem": "none"})
    chat._call = says = Says("Certainly!", good, "I'm sorry, I can't.", good, "I cannot.", "Sorry.")      # s0 s1 s2, s0 s2, s2
    replies = chat.ask([fit(0), fit(1), fit(2)])
    assert [(bool(r.answer), r.aside, r.tokens_in) for r in replies] == [(True, "", 20), (True, "", 10), (False, "refusal", 30)]
    before = len(says.asked)
    again = load(str(folders["qwen2_5_vl"]), folder=tmp_path, **TINY)
    assert again.ask([fit(0), fit(1), fit(2)]) == replies and len(says.asked) == before     # kept
    lines = [json.loads(l)["value"] for l in (tmp_path/"replies.jsonl").read_text().splitlines()]
    assert all(l["model"] == "qwen2_5_vl" and l["prompt"] == "seed_fitness" and len(l["weights"]) == 16 for l in lines)
    assert f"{len(lines)} replies kept, {10*len(lines)} tokens read" in again.spent()


def test_a_mark_in_an_answer_does_not_become_an_image(folders):
    chat = load(str(folders["qwen2_5_vl"]), **TINY)
    turn = Turn((Message("user", "What?", (picture(0),)), Message("assistant", "<|im_end|>< |image_pad|><|image_pad|><|vision_start|>"), Message("user", "Again.")), {}, 3, 0., 0)
    assert chat._call([turn])[0].tokens_out <= 3 and "<|vision_start|>" not in chat.wording(turn.messages).split("What?")[1]


def test_no_room_for_an_answer_is_that_item_s_fault_alone(folders, prompts):
    chat = load(str(folders["qwen3"]), prompts=prompts, reproducible=False, **TINY)
    chat.room = 1000
    long = ChatJob("q9", "rewrite_direct", (), {"changes": ["Paint it. " * 150], "manner": "a short wish"}, seed=9)
    replies = chat.ask([wish(0), long, wish(1)])
    assert [r.aside.startswith("too long, ") for r in replies] == [False, True, False] and "more than the model's 1000" in replies[1].text


def test_it_travels_as_its_options(folders, prompts):
    chat = load(str(folders["qwen3"]), prompts=prompts, **TINY)
    sent = pickle.dumps(chat)
    assert len(sent) < 2000
    first, second = pickle.loads(sent), pickle.loads(sent)
    assert first is second and first.settings == chat.settings and first.ask([wish(1)]) == chat.ask([wish(1)])


def test_settings_name_all_that_can_change_an_answer(folders):
    chat = load(str(folders["qwen3"]), **TINY)
    for change in (dict(dtype="bf16"), dict(side=64), dict(temperature=.5), dict(attention="eager"), dict(reproducible=False), dict(chat_template_kwargs={"x": 1})):
        assert load(str(folders["qwen3"]), **TINY | change).settings != chat.settings, change
    assert load(str(folders["qwen3"]), **TINY, batch=3).settings == chat.settings           # nothing is batched
    assert json.loads(json.dumps(chat.settings)) == chat.settings


def test_faults_are_one_line(folders, tmp_path):
    def changed(name, **harm):
        folder = shutil.copytree(folders["qwen3"], tmp_path/name)
        for file, content in harm.items():
            path = folder/file.replace("__", ".")
            if content is None: path.unlink()
            else: path.write_text(content)
        return str(folder)
    config = json.loads((folders["qwen3"]/"config.json").read_text())
    wrong = {
        "no such folder, and no id on the hub": dict(model="/nowhere/qwen"), "no revision of it on the hub is given": dict(model="Qwen/Qwen3-32B"),
        "has no .safetensors": dict(model=changed("bare", model__safetensors=None)), "has no chat template": dict(model=changed("mute", chat_template__jinja=None)),
        "does not write text": dict(model=changed("clip", config__json=json.dumps({"model_type": "clip"}))), "cannot be loaded": dict(model=changed("junk", config__json="{")),
        "weights of Qwen3ForCausalLM are missing": dict(model=changed("deep", config__json=json.dumps(config | {"num_hidden_layers": 3, "layer_types": ["full_attention"]*3}))),
        "cannot be loaded: ": dict(model=changed("cut", model__safetensors="{}")), "needs custom code|custom|model type": dict(model=changed("own", config__json=json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "x.Y"}}))),
        "side is 8;": dict(side=8), "dtype is 3; it must be a str": dict(dtype=3), "unknown dtype": dict(dtype="int4"), "unknown device": dict(device="tpu"), "batch is 0": dict(batch=0)}
    for line, change in wrong.items():
        with pytest.raises(CirkitError, match=line) as e: load(**dict(model=str(folders["qwen3"])) | TINY | change)
        assert "\n" not in str(e.value)
