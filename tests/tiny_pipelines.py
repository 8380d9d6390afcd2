"""Pipelines of diffusers and detectors of transformers, a few thousand weights each, saved as the hub's folders are. Nothing is downloaded."""
import json
from pathlib import Path

import diffusers
import torch
import transformers
from tokenizers import pre_tokenizers

import tiny_models

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SMALL = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
CLIP_IDS = dict(vocab_size=514, bos_token_id=512, eos_token_id=513, pad_token_id=513)
BLOCKS = dict(block_out_channels=(8, 16), norm_num_groups=4)
UNET = dict(layers_per_block=1, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **BLOCKS)


def clip_tokenizer(longest=77):
    "One token a byte."
    words = [*LETTERS, *(c + "</w>" for c in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    return transformers.CLIPTokenizer(vocab={w: n for n, w in enumerate(words)}, merges=[], model_max_length=longest)


def vae(): return diffusers.AutoencoderKL(down_block_types=["DownEncoderBlock2D"]*2, up_block_types=["UpDecoderBlock2D"]*2, latent_channels=4, **BLOCKS)
def clip_text(cls, **more): return cls(transformers.CLIPTextConfig(**CLIP_IDS, **SMALL, **more))


def safety_checker():
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    vision = dict(SMALL, image_size=32, patch_size=8)
    return StableDiffusionSafetyChecker(transformers.CLIPConfig(text_config=dict(SMALL, **CLIP_IDS), vision_config=vision, projection_dim=16))


def pix2pix(checked=False):
    unet = diffusers.UNet2DConditionModel(in_channels=8, cross_attention_dim=16, attention_head_dim=4, **UNET)
    safe = (safety_checker(), transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})) if checked else (None, None)
    return diffusers.StableDiffusionInstructPix2PixPipeline(vae(), clip_text(transformers.CLIPTextModel), clip_tokenizer(), unet, diffusers.EulerAncestralDiscreteScheduler(),
                                                            *safe, requires_safety_checker=checked)


def inpaint():
    unet = diffusers.UNet2DConditionModel(in_channels=9, cross_attention_dim=32, attention_head_dim=(2, 4), use_linear_projection=True, addition_embed_type="text_time",
                                          addition_time_embed_dim=8, projection_class_embeddings_input_dim=64, **UNET)
    return diffusers.StableDiffusionXLInpaintPipeline(vae(), clip_text(transformers.CLIPTextModel), clip_text(transformers.CLIPTextModelWithProjection, projection_dim=16),
                                                      clip_tokenizer(), clip_tokenizer(), unet, diffusers.EulerDiscreteScheduler(), add_watermarker=False)


def qwen_image():
    "Its image patches are 4 pixels, where the published ones are 14."
    tok, pixels, text = tiny_models.build("qwen2_5_vl")
    network = diffusers.QwenImageTransformer2DModel(patch_size=2, in_channels=16, out_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
                                                    guidance_embeds=False, axes_dims_rope=(8, 4, 4))
    coder = diffusers.AutoencoderKLQwenImage(base_dim=8, z_dim=4, dim_mult=[1, 2, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True], latents_mean=[0.]*4, latents_std=[1.]*4)

    class Processor(transformers.Qwen2VLProcessor):
        get_attributes = classmethod(lambda cls: ["image_processor", "tokenizer"])
    return diffusers.QwenImageEditPlusPipeline(diffusers.FlowMatchEulerDiscreteScheduler(), coder, text, tok, Processor(pixels, tok), network)


PUBLISHED = {"processor": ["transformers", "Qwen2VLProcessor"], "tokenizer": ["transformers", "Qwen2Tokenizer"]}   # classes as Qwen's own folder names them


def save(make, folder: Path, seed: int = 0) -> Path:
    "A pipeline's folder."
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipe = make()
    pipe.save_pretrained(folder)
    if make is qwen_image:
        index = json.loads((folder/"model_index.json").read_text())
        (folder/"model_index.json").write_text(json.dumps(index | PUBLISHED))
    return folder


def owl():
    config = transformers.OwlViTConfig(text_config=dict(CLIP_IDS, max_position_embeddings=32, **SMALL), vision_config=dict(image_size=48, patch_size=12, **SMALL), projection_dim=16)
    return transformers.OwlViTForObjectDetection(config), transformers.OwlViTProcessor(transformers.OwlViTImageProcessorPil(size={"height": 48, "width": 48}), clip_tokenizer(32))


def grounding_dino():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *"abcdefghijklmnopqrstuvwxyz", *("##" + c for c in "abcdefghijklmnopqrstuvwxyz")]
    swin = transformers.SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[1]*4, num_heads=[1]*4, window_size=2, out_features=["stage2", "stage3", "stage4"])
    config = transformers.GroundingDinoConfig(backbone_config=swin, text_config=dict(SMALL, model_type="bert", vocab_size=len(words)), d_model=32, encoder_layers=1, decoder_layers=2,
                                              encoder_ffn_dim=16, decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2, num_queries=9, max_text_len=64)
    pixels = transformers.GroundingDinoImageProcessorPil(size={"shortest_edge": 128, "longest_edge": 128})
    return transformers.GroundingDinoForObjectDetection(config), transformers.GroundingDinoProcessor(pixels, transformers.BertTokenizer(vocab={w: n for n, w in enumerate(words)}))


def save_detector(make, folder: Path, seed: int = 3) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, processor = make()
        for p in model.parameters():
            if p.dim() > 1: torch.nn.init.normal_(p, std=.3)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
