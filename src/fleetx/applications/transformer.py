"""The Transformer for translation (Vaswani et al. 2017), with pre-normalization."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu, scaled_dot_product_attention

from fleetx.applications.application import Application, Feed, check_heads, model_options, whole_by_default
from fleetx.data import Loader, load_wmt16_dataset_from_file, translation_train, translation_val
from fleetx.data.checks import check_fraction, check_int
from fleetx.data.translation import TranslationOptions
from fleetx.errors import UsageError


class TranslationOutput(NamedTuple):
    loss: Tensor
    sum_cost: Tensor
    token_num: Tensor


class WordEmbedding(nn.Module):
    """Embeds words and their positions."""

    def __init__(self, vocab_size: int, hidden: int, max_seq_len: int, dropout: float):
        super().__init__()
        self.table, self.dropout = nn.Embedding(vocab_size, hidden), nn.Dropout(dropout)
        self.encoding = nn.Buffer(_position_encoding(max_seq_len, hidden), persistent=False)
        self._scale = hidden**0.5
        nn.init.normal_(self.table.weight, std=hidden**-0.5)

    def forward(self, words: Tensor, positions: Tensor | None) -> Tensor:
        batch, length = words.shape[:2]
        if length > (longest := len(self.encoding)):
            raise UsageError(
                f"{length} words per row, but this Transformer was created with max_seq_len={longest}: pass shorter "
                "rows, or create it with a larger one"
            )
        encoding = self.encoding[:length] if positions is None else self.encoding[positions.reshape(batch, length)]
        result: Tensor = self.dropout(self.table(words.reshape(batch, length)) * self._scale + encoding)
        return result


class TranslationLoss(nn.Module):
    """Has no weights; it is a module so that a pipeline can see its inputs."""

    def __init__(self, label_smoothing: float):
        super().__init__()
        self._smoothing = label_smoothing

    def forward(self, logits: Tensor, labels: Tensor, weight: Tensor | None) -> TranslationOutput:
        costs = cross_entropy(
            logits.flatten(0, 1), labels.reshape(-1), reduction="none", label_smoothing=self._smoothing
        )
        weight = torch.ones_like(costs) if weight is None else weight.reshape(-1).to(costs.dtype)
        sum_cost, token_num = (costs * weight).sum(), weight.sum()
        return TranslationOutput(sum_cost / token_num, sum_cost.detach(), token_num)


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self._heads, self._dropout = heads, dropout

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None, causal: bool = False) -> Tensor:
        given = self.query(x), self.key(memory), self.value(memory)
        q, k, v = (t.unflatten(-1, (self._heads, -1)).transpose(1, 2) for t in given)
        dropout = self._dropout if self.training else 0.0
        bias = bias.to(q.dtype) if bias is not None else None
        out = scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, is_causal=causal)
        result: Tensor = self.output(out.transpose(1, 2).flatten(2))
        return result


class TransformerLayer(nn.Module):
    """A layer of the encoder, or of the decoder, which also attends to the encoder's output."""

    def __init__(self, hidden: int, heads: int, ffn: int, dropout: float, decoder: bool):
        super().__init__()
        self.norm_self, self.attention = nn.LayerNorm(hidden), Attention(hidden, heads, dropout)
        if decoder:
            self.norm_cross, self.cross = nn.LayerNorm(hidden), Attention(hidden, heads, dropout)
        self.norm_ffn, self.widen, self.narrow = nn.LayerNorm(hidden), nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)
        self.dropout = nn.Dropout(dropout)
        self._decoder = decoder

    def forward(
        self, x: Tensor, bias: Tensor | None, memory: Tensor | None = None, memory_bias: Tensor | None = None
    ) -> Tensor:
        y = self.norm_self(x)
        x = x + self.dropout(self.attention(y, y, bias, causal=self._decoder and bias is None))
        if memory is not None:
            x = x + self.dropout(self.cross(self.norm_cross(x), memory, memory_bias))
        out: Tensor = x + self.dropout(self.narrow(self.dropout(relu(self.widen(self.norm_ffn(x))))))
        return out


class Transformer(Application):
    """Source, target and output share one embedding. The loss is the mean over words, with label smoothing.

    A bias is added to the attention scores: 0, or very negative to hide a word. Without biases, every source word is
    visible, and target words see only those before them.
    """

    outputs = TranslationOutput._fields

    def __init__(
        self,
        *,
        layers: int = 6,
        hidden: int = 512,
        heads: int = 8,
        ffn: int | None = None,
        vocab_size: int = 37000,
        max_seq_len: int = 256,
        dropout: float = 0.1,
        label_smoothing: float = 0.1,
        **unknown: Any,
    ):
        """layers: in the encoder, and as many in the decoder; ffn: 4 * hidden by default."""
        super().__init__(unknown)
        check_int(layers=layers, hidden=hidden, heads=heads, vocab_size=vocab_size, max_seq_len=max_seq_len)
        ffn = 4 * hidden if ffn is None else ffn
        check_int(ffn=ffn)
        check_heads(hidden, heads)
        check_fraction(dropout=dropout, label_smoothing=label_smoothing)
        self.max_seq_len, self.vocab_size, self._layers = max_seq_len, vocab_size, layers
        self._heads = heads
        # Three modules share one weight, because they can be in different stages of a pipeline.
        self.src, self.trg = (WordEmbedding(vocab_size, hidden, max_seq_len, dropout) for _ in range(2))
        sizes = hidden, heads, ffn, dropout
        self.encoder = nn.ModuleList(TransformerLayer(*sizes, decoder=False) for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(hidden)
        self.decoder = nn.ModuleList(TransformerLayer(*sizes, decoder=True) for _ in range(layers))
        self.decoder_norm = nn.LayerNorm(hidden)
        self.project = nn.Linear(hidden, vocab_size, bias=False)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
        self.trg.table.weight = self.project.weight = self.src.table.weight
        self.criterion = TranslationLoss(label_smoothing)

    def feeds(self) -> dict[str, Feed]:
        words = Feed((-1, -1))
        bias = Feed((-1, self._heads, -1, -1), torch.float32)
        return {
            "src_word": words,
            "src_pos": words,
            "src_slf_attn_bias": bias,
            "trg_word": words,
            "trg_pos": words,
            "trg_slf_attn_bias": bias,
            "trg_src_attn_bias": bias,
            "lbl_word": words,
            "lbl_weight": Feed((-1, -1), torch.float32),
        }

    @property
    def checkpoints(self) -> list[str]:
        return [f"{side}.{i}" for side in ("encoder", "decoder") for i in range(self._layers)]

    def forward(
        self,
        src_word: Tensor,  # (batch, source); all of these may have a trailing dimension of 1
        trg_word: Tensor,  # (batch, target)
        lbl_word: Tensor,  # same length as trg_word
        src_pos: Tensor | None = None,
        trg_pos: Tensor | None = None,
        src_slf_attn_bias: Tensor | None = None,  # broadcasts to (batch, heads, source, source)
        trg_slf_attn_bias: Tensor | None = None,
        trg_src_attn_bias: Tensor | None = None,
        lbl_weight: Tensor | None = None,  # 0 for padding
    ) -> TranslationOutput:
        memory = self.src(src_word, src_pos)
        for layer in self.encoder:
            memory = layer(memory, src_slf_attn_bias)
        memory = self.encoder_norm(memory)
        x = self.trg(trg_word, trg_pos)
        for layer in self.decoder:
            x = layer(x, trg_slf_attn_bias, memory, trg_src_attn_bias)
        result: TranslationOutput = self.criterion(self.project(self.decoder_norm(x)), lbl_word, lbl_weight)
        return result

    # --- data -------------------------------------------------------------------------------------
    def load_wmt16_dataset_from_file(
        self,
        src_vocab_fpath: str | Path,
        trg_vocab_fpath: str | Path,
        train_file_pattern: str | Path,
        batch_size: int = 2048,
        shuffle: bool = True,
        **options: Unpack[TranslationOptions],
    ) -> Loader:
        """Load the files that match a pattern; see `fleetx.data`. batch_size counts tokens."""
        return load_wmt16_dataset_from_file(
            src_vocab_fpath, trg_vocab_fpath, train_file_pattern, batch_size, shuffle, **self._options(options)
        )

    def get_train_dataloader(
        self,
        local_path: str | Path,
        batch_size: int = 2048,
        shuffle: bool = True,
        **options: Unpack[TranslationOptions],
    ) -> Loader:
        """Load the files listed in the folder's train.txt."""
        return translation_train(local_path, batch_size, shuffle, **self._options(options))

    def get_val_dataloader(
        self,
        local_path: str | Path,
        batch_size: int = 2048,
        shuffle: bool = False,
        **options: Unpack[TranslationOptions],
    ) -> Loader:
        """Load the files listed in the folder's val.txt. Every rank reads all of them unless shard=True."""
        return translation_val(local_path, batch_size, shuffle, **self._options(whole_by_default(options)))

    def _options(self, options: TranslationOptions) -> TranslationOptions:
        if options.get("max_seq_len", 0) > self.max_seq_len:
            raise UsageError(
                f"max_seq_len = {options['max_seq_len']}: this model was created with max_seq_len = "
                f"{self.max_seq_len}, so pass no more"
            )
        return cast(
            TranslationOptions, model_options({"max_seq_len": self.max_seq_len} | options, vocab_size=self.vocab_size)
        )

    def paddle_names(self) -> dict[str, list[str]]:
        return super().paddle_names() | {"src.table.weight": ["trg_word_emb_table", "src_word_emb_table"]}


def _position_encoding(length: int, hidden: int) -> Tensor:
    """Half sines, half cosines, with wavelengths from 2 pi to 10000 * 2 pi."""
    positions = torch.arange(length)
    # Without a device, linspace may stay on the CPU under torch.device("meta"), because transformers patches it.
    rates = 10000.0 ** -torch.linspace(0, 1, (hidden + 1) // 2, device=positions.device)
    angles = positions[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :hidden]
