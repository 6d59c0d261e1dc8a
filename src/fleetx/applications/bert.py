"""BERT pre-training: masked words and next sentence prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fleetx.applications.application import Application, Feed, check_heads, model_options, whole_by_default
from fleetx.data import Loader, digital_train, digital_val, load_digital_dataset_from_file
from fleetx.data.bert import IGNORED, BertOptions
from fleetx.data.checks import check_choice, check_fraction, check_int, optional
from fleetx.errors import UsageError


class PretrainingOutput(NamedTuple):
    loss: Tensor
    mask_lm_loss: Tensor
    next_sent_acc: Tensor


class Bert(Application):
    """The BERT of `transformers`, with the parameter names of `BertForPreTraining`.

    The output layer is applied only to masked words. They are given in one of two forms:
    - `mask_pos` is a column (n, 1), or (n,), of positions in the flattened batch, row * length + column, and
      `mask_label` has the same length. Paddle's loaders use this form. Such a batch cannot be split into micro-batches.
    - `mask_pos` and `mask_label` are (batch, m) with m > 1. Positions are columns, and rows with fewer masked words are
      padded with the label -100. This form also works with a pipeline; the loss of each micro-batch is then the mean
      over its own masked words.
    """

    outputs = PretrainingOutput._fields
    sizes: ClassVar[tuple[int, int] | None]  # layers, hidden
    digital: ClassVar[tuple[int, int, bool]] = (4096, 512, True)
    """Defaults of load_digital_dataset_from_file: batch_size, max_seq_len, in_tokens."""
    vocabularies: ClassVar[dict[str, int]] = {"ch": 21128, "en": 30522}

    def __init__(
        self,
        lang: str = "ch",
        *,
        layers: int | None = None,
        hidden: int | None = None,
        heads: int | None = None,
        ffn: int | None = None,
        vocab_size: int | None = None,
        max_seq_len: int = 512,
        dropout: float = 0.1,
        **unknown: Any,
    ):
        """Defaults: `lang` determines vocab_size; heads = hidden / 64; ffn = 4 * hidden."""
        super().__init__(unknown)
        check_choice("lang", lang, tuple(self.vocabularies))
        if self.sizes is None and None in (layers, hidden):
            raise UsageError(
                f"the sizes of FleetX's {type(self).__name__} were not published: pass them, as in "
                f"{type(self).__name__}(layers=48, hidden=2560)"
            )
        if self.sizes is not None:
            layers = self.sizes[0] if layers is None else layers
            hidden = self.sizes[1] if hidden is None else hidden
        assert layers is not None
        assert hidden is not None
        vocab_size = self.vocabularies[lang] if vocab_size is None else vocab_size
        check_int(layers=layers, hidden=hidden, vocab_size=vocab_size, max_seq_len=max_seq_len)
        heads = max(1, hidden // 64) if heads is None else heads
        ffn = 4 * hidden if ffn is None else ffn
        check_int(heads=heads, ffn=ffn)
        check_heads(hidden, heads)
        check_fraction(dropout=dropout)
        self.lang, self.max_seq_len, self.vocab_size, self._layers = lang, max_seq_len, vocab_size, layers
        transformers = optional("transformers", f"{type(self).__name__} needs transformers")
        config = transformers.BertConfig(
            vocab_size=vocab_size,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=ffn,
            max_position_embeddings=max_seq_len,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        model = transformers.BertForPreTraining(config)
        self.bert, self.cls = model.bert, model.cls
        self.gather, self.criterion = GatherMasked(), PretrainingLoss()

    def feeds(self) -> dict[str, Feed]:
        words, masked = Feed((-1, -1)), Feed((-1, 1), by_sample=False)
        return {
            "src_ids": words,
            "pos_ids": words,
            "sent_ids": words,
            "input_mask": Feed((-1, -1, 1), torch.float32),
            "mask_label": masked,
            "mask_pos": masked,
            "labels": Feed((-1, 1)),
        }

    @property
    def checkpoints(self) -> list[str]:
        return [f"bert.encoder.layer.{i}" for i in range(self._layers)]

    def forward(
        self,
        src_ids: Tensor,  # this and the next three: (batch, length) or (batch, length, 1)
        pos_ids: Tensor,
        sent_ids: Tensor,
        input_mask: Tensor,  # 1 for words, 0 for padding
        mask_label: Tensor,
        mask_pos: Tensor,
        labels: Tensor,  # (batch, 1) or (batch,)
    ) -> PretrainingOutput:
        batch, length = src_ids.shape[:2]
        if length > self.max_seq_len:
            raise UsageError(
                f"src_ids has {length} words per row, but this BERT was created with max_seq_len={self.max_seq_len}: "
                "pass shorter rows, or create it with a larger one"
            )
        if mask_label.numel() != mask_pos.numel():
            raise UsageError(
                f"mask_label has {mask_label.numel()} entries, but mask_pos has {mask_pos.numel()}: pass one for each "
                "position"
            )
        out = self.bert(
            src_ids.reshape(batch, length),
            attention_mask=input_mask.reshape(batch, length).long(),
            token_type_ids=sent_ids.reshape(batch, length),
            position_ids=pos_ids.reshape(batch, length),
        )
        words = self.cls.predictions(self.gather(out.last_hidden_state, mask_pos))
        next_sent = self.cls.seq_relationship(out.pooler_output)
        result: PretrainingOutput = self.criterion(words, next_sent, mask_label, labels)
        return result

    # --- data -------------------------------------------------------------------------------------
    def load_digital_dataset_from_file(
        self,
        data_dir: str | Path,
        vocab_path: str | Path,
        batch_size: int | None = None,
        max_seq_len: int | None = None,
        in_tokens: bool | None = None,
        shuffle: bool = True,
        **options: Unpack[BertOptions],
    ) -> Loader:
        """Load all files of a folder; see `fleetx.data`. max_seq_len is at most the model's.

        By default, a batch has 4096 tokens and max_seq_len is 512; for BertLarge, 16 samples and 128.
        """
        size, longest, tokens = self.digital
        length, options = self._loader_options(max_seq_len, longest, options)
        in_tokens = tokens if in_tokens is None else in_tokens
        batch_size = size if batch_size is None else batch_size
        return load_digital_dataset_from_file(data_dir, vocab_path, batch_size, length, in_tokens, shuffle, **options)

    load_digital_dataset_from_file_v2 = load_digital_dataset_from_file  # FleetX's reader of lines with 7 fields

    def get_train_dataloader(
        self,
        data_dir: str | Path,
        batch_size: int = 4096,
        max_seq_len: int | None = None,
        in_tokens: bool = True,
        shuffle: bool = True,
        **options: Unpack[BertOptions],
    ) -> Loader:
        """Load the files listed in the folder's train.txt; see `digital_train`. max_seq_len is at most the model's."""
        length, options = self._loader_options(max_seq_len, 512, options)
        return digital_train(data_dir, batch_size, length, in_tokens, shuffle, **options)

    def get_val_dataloader(
        self,
        data_dir: str | Path,
        batch_size: int = 4096,
        max_seq_len: int | None = None,
        in_tokens: bool = True,
        shuffle: bool = False,
        **options: Unpack[BertOptions],
    ) -> Loader:
        """Load the files listed in the folder's val.txt; see `digital_val`. max_seq_len is at most the model's.

        Every rank reads all of them unless shard=True.
        """
        length, options = self._loader_options(max_seq_len, 512, whole_by_default(options))
        return digital_val(data_dir, batch_size, length, in_tokens, shuffle, **options)

    def _loader_options(self, length: int | None, default: int, options: BertOptions) -> tuple[int, BertOptions]:
        if length is not None and length > self.max_seq_len:
            raise UsageError(
                f"max_seq_len = {length}: this model was created with max_seq_len = {self.max_seq_len}, so pass no more"
            )
        length = min(default, self.max_seq_len) if length is None else length
        return length, cast(BertOptions, model_options(options, vocab_size=self.vocab_size))

    def paddle_names(self) -> dict[str, list[str]]:
        names = dict(_NAMES)
        layers = {f"bert.encoder.layer.{i}.{name}": f"encoder_layer_{i}_{paddle}"
                  for i in range(self._layers) for name, paddle in _LAYER.items()}  # fmt: skip
        for name, paddle in (_MODULES | layers).items():
            weight, bias = ("_scale", "_bias") if paddle.endswith("layer_norm") else (".w_0", ".b_0")
            names |= {f"{name}.weight": paddle + weight, f"{name}.bias": paddle + bias}
        return {name: [paddle] for name, paddle in names.items()}


# These two have no weights. They are modules because a pipeline derives where it can cut the model from the tensors
# that pass between modules.
class GatherMasked(nn.Module):
    def forward(self, hidden: Tensor, mask_pos: Tensor) -> Tensor:
        """Select positions: (n, hidden) for positions in the flattened batch, (batch, m, hidden) for columns."""
        if mask_pos.dim() == 1 or mask_pos.shape[1:].numel() == 1:
            return hidden.flatten(0, 1)[mask_pos.reshape(-1)]
        if len(mask_pos) != len(hidden):
            raise UsageError(
                f"mask_pos has {len(mask_pos)} rows, but the batch has {len(hidden)}: pass the columns of each row, or "
                "a single column of positions in the flattened batch"
            )
        rows = torch.arange(len(hidden), device=mask_pos.device)[:, None]
        return hidden[rows, mask_pos.flatten(1)]


class PretrainingLoss(nn.Module):
    def forward(self, words: Tensor, next_sent: Tensor, mask_label: Tensor, labels: Tensor) -> PretrainingOutput:
        mask_lm_loss = cross_entropy(words.flatten(0, -2), mask_label.reshape(-1), ignore_index=IGNORED)
        labels = labels.reshape(-1)
        with torch.no_grad():
            next_sent_acc = (next_sent.argmax(-1) == labels).float().mean()
        loss = mask_lm_loss + cross_entropy(next_sent, labels)
        return PretrainingOutput(loss, mask_lm_loss.detach(), next_sent_acc)


# Parameter names in Paddle's static BERT.
_NAMES = {
    "bert.embeddings.word_embeddings.weight": "word_embedding",
    "bert.embeddings.position_embeddings.weight": "pos_embedding",
    "bert.embeddings.token_type_embeddings.weight": "sent_embedding",
    "cls.predictions.bias": "mask_lm_out_fc.b_0",
}
_MODULES = {
    "bert.embeddings.LayerNorm": "pre_encoder_layer_norm",
    "bert.pooler.dense": "pooled_fc",
    "cls.predictions.transform.dense": "mask_lm_trans_fc",
    "cls.predictions.transform.LayerNorm": "mask_lm_trans_layer_norm",
    "cls.seq_relationship": "next_sent_fc",
}
_LAYER = {
    "attention.self.query": "multi_head_att_query_fc",
    "attention.self.key": "multi_head_att_key_fc",
    "attention.self.value": "multi_head_att_value_fc",
    "attention.output.dense": "multi_head_att_output_fc",
    "attention.output.LayerNorm": "post_att_layer_norm",
    "intermediate.dense": "ffn_fc_0",
    "output.dense": "ffn_fc_1",
    "output.LayerNorm": "post_ffn_layer_norm",
}


class BertBase(Bert):
    sizes = (12, 768)


class BertLarge(Bert):
    sizes = (24, 1024)
    digital = (16, 128, False)


class Bert_base(BertBase):  # noqa: N801
    """The older name, without a language: its vocabulary is large enough for either."""

    vocabularies = {"ch": 30522, "en": 30522}


class Bert_large(BertLarge):  # noqa: N801
    """The older name, without a language: its vocabulary is large enough for either."""

    vocabularies = {"ch": 30522, "en": 30522}


class FirstBert(BertLarge):
    """`applications.Bert` of June 2020."""

    vocabularies = {"ch": 30522, "en": 30522}
    digital = (8196, 512, True)


class BertHuge(Bert):
    sizes = None

    def __init__(self, lang: str = "en", **options: Any):
        super().__init__(lang, **options)


class BertGiant(BertHuge):
    """27.4 billion parameters in FleetX."""
