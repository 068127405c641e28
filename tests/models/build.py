"""Random two-layer models with a tokenizer of their own, small enough to be made for every test run."""

from __future__ import annotations

from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build(kind: str, folder: Path, *, max_length: int = 128, layers: int = 2) -> Path:
    """Writes a model of that architecture, in float32, with random weights from a fixed seed."""
    import torch
    import transformers as tf

    size = tokenizer(folder)
    ids = {"vocab_size": size, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 2}
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": max_length}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "llama":  # tied embeddings, shared key heads
            model = tf.LlamaForCausalLM(tf.LlamaConfig(**shape, **ids, tie_word_embeddings=True))
        elif kind == "qwen3":  # a head of its own, norms on queries and keys, heads wider than hidden / heads
            model = tf.Qwen3ForCausalLM(tf.Qwen3Config(**shape, **ids, head_dim=16, tie_word_embeddings=False))
        elif kind == "qwen2":  # biases of queries, keys and values
            model = tf.Qwen2ForCausalLM(tf.Qwen2Config(**shape, **ids, tie_word_embeddings=True))
        elif kind == "gpt2":  # learned positions, Conv1D layers, no shared key heads
            config = tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=max_length, **ids)
            model = tf.GPT2LMHeadModel(config)
        elif kind == "mistral":  # a sliding window
            model = tf.MistralForCausalLM(tf.MistralConfig(**shape, **ids, sliding_window=8))
        elif kind == "gemma2":  # capped logits and scores, every other layer with a window
            model = tf.Gemma2ForCausalLM(tf.Gemma2Config(**shape, **ids, head_dim=8, sliding_window=8))
        elif kind == "mixtral":  # experts
            model = tf.MixtralForCausalLM(tf.MixtralConfig(**shape, **ids, num_local_experts=4))
        elif kind == "bloom":  # positions as a bias of the scores
            model = tf.BloomForCausalLM(tf.BloomConfig(hidden_size=32, n_layer=2, n_head=4, **ids))
        elif kind == "falcon":  # the same, with a context that has an end
            model = tf.FalconForCausalLM(tf.FalconConfig(**shape, **ids, alibi=True))
        elif kind == "mamba":  # a state instead of keys and values
            model = tf.MambaForCausalLM(
                tf.MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=8, time_step_rank=4, **ids)
            )
        else:
            raise ValueError(kind)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)  # far from uniform
    model.save_pretrained(folder)
    return folder


def tokenizer(folder: Path) -> int:
    """Writes a small tokenizer with a chat template; the size of its vocabulary."""
    import transformers as tf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over 1 + 2 = 3 hello world"] * 3, trainer)
    names = {"bos_token": special[0], "eos_token": special[2], "pad_token": special[2]}
    fast = tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return len(fast)
