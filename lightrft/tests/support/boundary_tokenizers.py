"""Two tokenizers whose tokens show where a text was cut: one merges line breaks, one puts a blank before texts."""
from tokenizers import decoders, models, normalizers, pre_tokenizers, Tokenizer
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<H>", "</H>", "<E>", "<U>", "<A>"]


def finished(made, kind, template):
    made.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
                                   pad_token="</s>", chat_template=template, name_or_path=f"{kind} tokenizer")


def byte_level(template=None):
    """A byte-level BPE that merges line breaks, and a line break with a colon before it, across any boundary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("ĊĊ", "ĊĊ"), (":", "Ġ"), ("Ġ", "2")]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *letters, *map("".join, merges)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return finished(made, "byte-level", template)


def metaspace(template=None):
    """A BPE of characters that puts a blank before every text, as Llama-2's."""
    letters = [chr(i) for i in range(33, 127)] + ["▁", "\n"]
    merges = [("\n", "\n"), ("▁", "2"), ("▁", "["), ("▁", "▁")]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *letters, *map("".join, merges)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return finished(made, "Metaspace", template)
