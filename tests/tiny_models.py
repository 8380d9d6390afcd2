"""Models of the real architectures, a few thousand weights each, saved as the hub's folders are: config, weights, tokenizer, image processor.

In a file of its own, so that several test files (and notebooks) can use it. Nothing is downloaded.
"""
import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from cirkit.embed.mm_embed import MmEmbed

SPECIAL = {
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    "omni": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"],
    "onevision": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"],
    "mistral": ["<unk>", "<s>", "</s>", "<image>", "<pad>"],
    "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<image>", "<pad>"],
    "llama32": ["<|begin_of_text|>", "<|end_of_text|>", "<|python_tag|>", "<|image|>", "<pad>"],
}
BEGIN = {"mistral": "<s>", "llama3": "<|begin_of_text|>"}    # put in front of every sequence
PADS = dict.fromkeys(("qwen", "omni", "onevision"), "<|endoftext|>")    # the others have one of that name
WIDTH = 32


def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    "One token a byte, and the special tokens that the architecture's prompts need."
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.add_special_tokens(SPECIAL[kind])
    begin = BEGIN.get(kind)
    if begin: t.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, t.token_to_id(begin))])
    names = {"pad_token": PADS.get(kind, "<pad>"), "eos_token": SPECIAL[kind][2 if kind == "mistral" else 1 if kind.startswith("llama") else 0]}
    if begin or kind == "llama32": names["bos_token"] = begin or "<|begin_of_text|>"
    return PreTrainedTokenizerFast(tokenizer_object=t, padding_side="right", **names)


def ids(tok, **names): return {key: tok.convert_tokens_to_ids(token) for key, token in names.items()}


def text_config(tok, heads=4, kv=2, layers=2, **more):
    return dict(vocab_size=len(tok), hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv,
                max_position_embeddings=4096, bos_token_id=None, eos_token_id=None, pad_token_id=tok.pad_token_id, use_cache=False, **more)


MROPE = {"rope_type": "default", "rope_theta": 10000., "mrope_section": [2, 1, 1]}


def qwen2_vl(tok):
    vision = dict(depth=1, embed_dim=16, hidden_size=WIDTH, num_heads=2, patch_size=4, mlp_ratio=2)
    return transformers.Qwen2VLConfig(text_config=text_config(tok, rope_parameters=MROPE), vision_config=vision, **qwen_ids(tok))


def qwen2_5_vl(tok):
    vision = dict(depth=2, hidden_size=16, intermediate_size=24, out_hidden_size=WIDTH, num_heads=2, patch_size=4, window_size=16, fullatt_block_indexes=[1])
    return transformers.Qwen2_5_VLConfig(text_config=text_config(tok, rope_parameters=MROPE), vision_config=vision, **qwen_ids(tok))


def qwen3_vl(tok):
    vision = dict(depth=3, hidden_size=16, intermediate_size=24, out_hidden_size=WIDTH, num_heads=2, patch_size=4, num_position_embeddings=64, deepstack_visual_indexes=[0, 1])
    text = text_config(tok, layers=3, head_dim=8, rope_parameters=MROPE | {"mrope_interleaved": True})
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **qwen_ids(tok))


def qwen_ids(tok): return ids(tok, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>", vision_start_token_id="<|vision_start|>", vision_end_token_id="<|vision_end|>")


def qwen2_5_omni_thinker(tok):
    vision = dict(depth=2, hidden_size=16, intermediate_size=24, out_hidden_size=WIDTH, num_heads=2, patch_size=4, window_size=16, fullatt_block_indexes=[1])
    audio = dict(d_model=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=16, output_dim=WIDTH, num_mel_bins=8, max_source_positions=8, n_window=2)
    more = ids(tok, image_token_id="<|IMAGE|>", video_token_id="<|VIDEO|>", audio_token_id="<|AUDIO|>", vision_start_token_id="<|vision_bos|>", vision_end_token_id="<|vision_eos|>",
               audio_start_token_id="<|audio_bos|>", audio_end_token_id="<|audio_eos|>")
    return transformers.Qwen2_5OmniThinkerConfig(text_config=text_config(tok, rope_parameters=MROPE), vision_config=vision, audio_config=audio, **more)


def llava_next(tok, text="mistral"):
    vision = dict(model_type="clip_vision_model", hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=4, projection_dim=16)
    return transformers.LlavaNextConfig(text_config=text_config(tok, model_type=text), vision_config=vision, image_token_index=tok.convert_tokens_to_ids("<image>"),
                                        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]])


def llava_next_llama3(tok): return llava_next(tok, "llama")


RESOLUTIONS = [[16*h, 16*w] for h in range(1, 5) for w in range(1, 5)]     # up to 16 tiles, of which nine tiles' tokens are left


def llava_onevision(tok):
    vision = dict(model_type="siglip_vision_model", hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=4, vision_use_head=False)
    return transformers.LlavaOnevisionConfig(text_config=text_config(tok, model_type="qwen2"), vision_config=vision, image_grid_pinpoints=RESOLUTIONS,
                                             **ids(tok, image_token_index="<image>", video_token_index="<video>"))


def mm_embed(tok):
    config = llava_next(tok)
    config.architectures = ["NVMMEmbedModel"]
    for name, value in (("num_latents", 5), ("num_cross_heads", 2), ("cross_dim_head", 8)): setattr(config, name, value)
    return config


def mllama(tok):
    vision = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_global_layers=1, attention_heads=2, image_size=16, patch_size=4, max_num_tiles=4,
                  vision_output_dim=32, intermediate_layers_indices=[1], supported_aspect_ratios=[[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]])
    text = text_config(tok, layers=4, cross_attention_layers=[1, 3], rope_parameters={"rope_type": "default", "rope_theta": 10000.}) | {"bos_token_id": 0}
    return transformers.MllamaConfig(text_config=text, vision_config=vision, image_token_index=tok.convert_tokens_to_ids("<|image|>"))


def qwen_pixels(): return transformers.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size={"shortest_edge": 4*64, "longest_edge": 64*64})


def llava_pixels():
    return transformers.LlavaNextImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]])


def onevision_pixels(): return transformers.LlavaOnevisionImageProcessorPil(size={"height": 16, "width": 16}, image_grid_pinpoints=RESOLUTIONS)


def mllama_pixels(): return transformers.MllamaImageProcessorPil(size={"height": 16, "width": 16}, max_image_tiles=4)


# architecture -> kind of tokenizer, its config, image processor, class with a language head, as published checkpoints have it
ARCHITECTURES: dict[str, tuple[str, Callable, Callable, str]] = {
    "qwen2_vl": ("qwen", qwen2_vl, qwen_pixels, "Qwen2VLForConditionalGeneration"),
    "qwen2_5_vl": ("qwen", qwen2_5_vl, qwen_pixels, "Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl": ("qwen", qwen3_vl, qwen_pixels, "Qwen3VLForConditionalGeneration"),
    "qwen2_5_omni_thinker": ("omni", qwen2_5_omni_thinker, qwen_pixels, "Qwen2_5OmniThinkerForConditionalGeneration"),
    "llava_next": ("mistral", llava_next, llava_pixels, "LlavaNextForConditionalGeneration"),
    "llava_next_llama3": ("llama3", llava_next_llama3, llava_pixels, "LlavaNextForConditionalGeneration"),
    "llava_onevision": ("onevision", llava_onevision, onevision_pixels, "LlavaOnevisionForConditionalGeneration"),
    "mm_embed": ("mistral", mm_embed, llava_pixels, ""),      # cirkit's own class
    "mllama": ("llama32", mllama, mllama_pixels, "MllamaForConditionalGeneration"),
}


def build(architecture: str, seed: int = 0):
    "Tokenizer, image processor and model, with weights large enough for every part to matter."
    kind, config, pixels, name = ARCHITECTURES[architecture]
    tok = tokenizer(kind)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = (getattr(transformers, name) if name else MmEmbed)(config(tok)).eval()
        with torch.no_grad():
            for key, p in model.named_parameters():
                if p.dim() > 1: p.normal_(std=.2)
                elif "gate" in key: p.fill_(.7)          # Mllama starts with its cross attention switched off
    return tok, pixels(), model


def save(architecture: str, folder: Path, seed: int = 0) -> Path:
    "A model folder as the hub has it."
    tok, pixels, model = build(architecture, seed)
    for part in (tok, pixels, model): part.save_pretrained(folder)
    if architecture == "mm_embed":     # published under the name of a class of its own
        config = json.loads((folder/"config.json").read_text())
        (folder/"config.json").write_text(json.dumps(config | {"architectures": ["NVMMEmbedModel"]}))
    return folder


CHAT = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
        "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n")


def qwen3(tok): return transformers.Qwen3Config(head_dim=8, **text_config(tok) | {"eos_token_id": tok.convert_tokens_to_ids("<|im_end|>"), "max_position_embeddings": 16384})


def save_chat(architecture: str, folder: Path, seed: int = 0) -> Path:
    "A folder of a model that answers questions: one of ARCHITECTURES with Qwen's marks, or 'qwen3', which sees nothing."
    if architecture != "qwen3": tok, pixels, model = build(architecture, seed)
    else:
        tok, pixels = tokenizer("qwen"), None
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = transformers.Qwen3ForCausalLM(qwen3(tok))
            for p in model.parameters():
                if p.dim() > 1: torch.nn.init.normal_(p, std=.2)
    tok.chat_template, tok.eos_token = CHAT, "<|im_end|>"
    if pixels: model.config.text_config.max_position_embeddings = 16384
    for part in (tok, pixels, model):
        if part: part.save_pretrained(folder)
    return folder
