"Prompts: every published string as it stands in the authors' notes, for both sides and for what there is to show."
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cirkit.embed.prompts import TEMPLATES, instruction_part, render, shown_instruction
from cirkit.errors import CirkitError

VISION = "<|vision_start|><|image_pad|><|vision_end|>"
SYSTEM = "You are a helpful assistant."


def chatml(system, user, rest): return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{rest}"


LLAMA3 = "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n \n"
CIR = "Retrieve the target image that best meets the combined criteria by using both the provided image and the image retrieval instructions: "
EVERYDAY = "I'm looking for a similar everyday image with the described changes."
EDIR = "Given an image, find a similar image satisfying the query. "
CIRR = "Retrieve a day-to-day image that aligns with the modification instructions of the provided image."
FIND = "Find an image that matches the given text."

PUBLISHED = [   # template, side, images, text, instruction, what the model reads
    ("gme", "query", 1, "in red", FIND, chatml(FIND, VISION + "in red", "<|endoftext|>")),
    ("gme", "query", 0, "a red dress", FIND, chatml(FIND, "a red dress", "<|endoftext|>")),
    ("gme", "query", 1, "", "", chatml(SYSTEM, VISION, "<|endoftext|>")),
    ("gme", "target", 1, "", "", chatml(SYSTEM, VISION, "<|endoftext|>")),
    ("ops-mm", "query", 2, "in red", "", chatml(SYSTEM, VISION*2 + "in red", "<|endoftext|>")),
    ("ops-mm", "target", 1, "", "", chatml(SYSTEM, VISION, "<|endoftext|>")),
    ("system-user", "query", 1, "in red", EDIR, chatml(EDIR, VISION + "in red", "<|endoftext|>")),
    ("rzenembed", "query", 1, "in red", EDIR, chatml(SYSTEM, f"{VISION}{EDIR}in red", "<|endoftext|>")),
    ("rzenembed", "query", 0, "in red", "", chatml(SYSTEM, "in red", "<|endoftext|>")),
    ("rzenembed", "query", 1, "", "", chatml(SYSTEM, VISION, "<|endoftext|>")),                       # CIRCUS, image only
    ("rzenembed", "target", 1, "", "", chatml(SYSTEM, VISION + "Represent the given image.", "<|endoftext|>")),
    ("lamra", "query", 1, "in red", EVERYDAY, chatml(SYSTEM, f"{VISION}{EVERYDAY} in red\nSummarize above image and sentence in one word: ", "<emb>.<|im_end|>\n")),
    ("lamra", "query", 1, "in red", "", chatml(SYSTEM, f"{VISION}in red\nSummarize above image and sentence in one word: ", "<emb>.<|im_end|>\n")),
    ("lamra", "query", 0, "in red", "", chatml(SYSTEM, "in red\nSummarize above sentence in one word: ", "<emb>.<|im_end|>\n")),
    ("lamra", "target", 1, "", "", chatml(SYSTEM, f"{VISION}\nSummarize above image in one word: ", "<emb>.<|im_end|>\n")),
    ("qwen3-vl", "query", 1, "in red", "Find the dress", chatml("Find the dress.", VISION + "in red", "")),
    ("qwen3-vl", "query", 1, "in red", "", chatml("Represent the user's input.", VISION + "in red", "")),
    ("qwen3-vl", "target", 1, "", "", chatml("Represent the user's input.", VISION, "")),
    ("qwen3-vl", "query", 0, "", "", chatml("Represent the user's input.", "NULL", "")),
    ("qwen3-vl-circus", "query", 1, "in red", CIRR, chatml(CIRR, VISION + "in red", "")),
    ("qwen3-vl-circus", "query", 1, "in red", "", chatml("", VISION + "in red", "")),                 # CIRCUS, LaSCo
    ("qwen3-vl-circus", "target", 1, "", "", chatml("Represent the user's input.", VISION, "")),
    ("e5-omni", "query", 1, "in red", "", chatml(SYSTEM, "<|vision_bos|><|IMAGE|><|vision_eos|>in red", "<|endoftext|>")),
    ("e5-omni", "query", 1, "", "", chatml(SYSTEM, "<|vision_bos|><|IMAGE|><|vision_eos|>", "<|endoftext|>")),
    ("e5-omni", "target", 1, "", "", chatml(SYSTEM, "<|vision_bos|><|IMAGE|><|vision_eos|>Describe the image.", "<|endoftext|>")),
    ("vlm2vec", "query", 1, "what is red", "", "<|image_1|> Represent the given image with the following question: what is red"),
    ("vlm2vec", "target", 1, "", "", "<|image_1|> Represent the given image."),
    ("vlm2vec", "query", 0, "a red dress", "", "a red dress"),
    ("vlm2vec-v2", "query", 1, "in red", EDIR, f"{VISION}\n{EDIR}in red\n"),
    ("vlm2vec-v2", "query", 1, "in red", "Find it.", f"{VISION}\nFind it. in red\n"),
    ("vlm2vec-v2", "target", 1, "", "Represent the given image.", f"{VISION}\nRepresent the given image.\n"),
    ("vlm2vec-v2-circus", "query", 1, "in red", "", "<|image_pad|> in red"),
    ("vlm2vec-v2-circus", "query", 1, "", "", "<|image_pad|> Represent the given image."),
    ("vlm2vec-v2-circus", "target", 1, "", "", "<|image_pad|> Represent the given image."),
    ("unime-v2", "query", 1, "in red", "Find it.", f"{VISION}\nFind it. in red\n"),
    ("mme5", "query", 1, "in red", "", "<|image|><|begin_of_text|>Represent the given image with the following question: in red\n"),
    ("mme5", "query", 1, "in red", "Represent the given image with the following question: ", "<|image|><|begin_of_text|>Represent the given image with the following question: in red\n"),
    ("mme5", "target", 1, "", "", "<|image|><|begin_of_text|>Represent the given image.\n"),
    ("e5-v", "target", 1, "", "", LLAMA3.format("<image>\nSummary above image in one word: ")),
    ("e5-v", "query", 0, "a red dress", "", LLAMA3.format("a red dress\nSummary above sentence in one word: ")),
    ("e5-v-cirr", "target", 1, "", "", LLAMA3.format("<image>\n Describe this image in one word:")),
    ("e5-v-cirr", "query", 1, "make it red", "", LLAMA3.format('<image>Modify this image with "make it red", desribe modified image in one word:')),
    ("e5-v", "query", 1, "make it red", "", LLAMA3.format('<image>Modify this image with "make it red", desribe modified image in one word:')),
    ("e5-v-dress", "target", 1, "", "", LLAMA3.format("<image>\n Describe this dress in one word based on its style:")),
    ("e5-v-dress", "query", 1, "red", "", LLAMA3.format("<image> change the style of this dress to red\n Desribe this modified dress in one word based on its style:")),
    ("e5-v-toptee", "query", 1, "red", "", LLAMA3.format("<image> change the style of this shirt to red\n Desribe this modified shirt in one word based on its style:")),
    ("unime-phi", "target", 1, "", "", "<|user|>\n<|image_1|>\nSummary above image in one word: <|end|>\n<|assistant|>\n"),
    ("unime-phi", "query", 0, "a dress", "", "<|user|>\na dress\nSummary above sentence in one word: <|end|>\n<|assistant|>\n"),
    ("unime-llava", "target", 1, "", "", "[INST] <image>\nSummary above image in one word: [/INST]"),
    ("unime-llava", "query", 0, "a dress", "", "[INST] a dress\nSummary above sentence in one word: [/INST]"),
    ("unime-llava-ov", "target", 1, "", "", "<|im_start|>user <image>\nSummary above image in one word:\n<|im_end|><|im_start|>assistant\n"),
    ("unime-llava-ov", "query", 0, "a dress", "", "<|im_start|>user \na dress\nSummary above sentence in one word:\n<|im_end|><|im_start|>assistant\n"),
    ("unime-v2-llava-ov", "query", 1, "in red", "Find it.", "<|im_start|>user <image>\nFind it. in red<|im_end|><|im_start|>assistant\n"),
    ("unime-v2-llava-ov", "query", 0, "in red", "", "<|im_start|>user \nin red<|im_end|><|im_start|>assistant\n"),
    ("unime-v2-llava-ov", "target", 1, "", "", "<|im_start|>user <image>\nRepresent the given image.<|im_end|><|im_start|>assistant\n"),
    ("bge-vl-mllm", "query", 1, "in red", CIR, f"[INST] \n <instruct> {CIR} <query>  in red \n <image> [/INST]"),
    ("bge-vl-mllm", "query", 0, "in red", CIR, f"[INST] \n <instruct> {CIR} <query>  in red \n [/INST]"),
    ("bge-vl-mllm", "query", 1, "in red", "", "[INST] \n <instruct>  <query> in red \n <image> [/INST]"),
    ("bge-vl-mllm", "target", 1, "", "", "[INST]  <image> [/INST]"),
    ("bge-vl-mllm", "target", 1, "a dress", "", "[INST]  a dress \n <image> [/INST]"),
    ("mm-embed", "query", 1, "in red", CIRR, f"Instruct: {CIRR}\nQuery: <image>\nin red"),
    ("mm-embed", "query", 1, "in red", "", "Query: <image>\nin red"),
    ("mm-embed", "query", 0, "in red", CIRR, f"Instruct: {CIRR}\nQuery: in red"),
    ("mm-embed", "query", 1, "", CIRR, f"Instruct: {CIRR}\nQuery: <image>\n"),
    ("mm-embed", "target", 1, "", "", "<image>\n"),
    ("mm-embed", "target", 1, "a dress", "", "<image>\na dress"),
]


@pytest.mark.parametrize("name, side, images, text, instruction, string", PUBLISHED)
def test_published_string(name, side, images, text, instruction, string): assert render(name, images, text, side, instruction) == string


def test_every_template_is_covered():
    tried = {name for name, *_ in PUBLISHED}
    same = {name for name, t in TEMPLATES.items() if any(TEMPLATES[other] is t for other in tried)}
    assert set(TEMPLATES) - tried - same <= {"e5-v-shirt", "mm-embed-circus"}
    assert render("e5-v-shirt", 1, "red") == render("e5-v-toptee", 1, "red")


@given(st.sampled_from(sorted(TEMPLATES)), st.text(min_size=1), st.text(max_size=20), st.integers(1, 3), st.sampled_from(["query", "target"]))
def test_marks_are_counted_and_texts_survive(name, text, instruction, images, side):
    string = render(name, images, text, side, instruction)
    assert text in string
    plain = render(name, images, "X", side, "Y")
    marks = [TEMPLATES[name].mark.format(n=n + 1) for n in range(images)]
    assert sum(plain.count(m) for m in dict.fromkeys(marks)) == images and marks[0] in plain


def test_what_pooling_leaves_out_is_the_instruction():
    whole = render("mm-embed", 1, "in red", instruction="Find it.")
    assert instruction_part("mm-embed", whole) == "Instruct: Find it." and instruction_part("mm-embed", render("mm-embed", 1, side="target")) == ""


def test_an_item_without_instruction():
    assert shown_instruction("gme", FIND, instruct=False) == "" and shown_instruction("gme", FIND, instruct=True) == FIND
    assert shown_instruction("mm-embed-circus", CIRR, instruct=False) == CIRR


def test_errors_name_what_was_wrong():
    with pytest.raises(CirkitError, match="unknown template 'qwen3vl'; did you mean qwen3-vl"): render("qwen3vl", 1)
    with pytest.raises(CirkitError, match="unknown side"): render("gme", 1, side="document")


def test_prompts_need_no_torch():
    code = "import sys, cirkit.embed.prompts; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
