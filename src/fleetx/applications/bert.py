"""BERT, trained on masked words and on whether one sentence follows the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fleetx.applications.application import Application, Feed, check_dropout, check_heads, in_form, need_transformers
from fleetx.data import Loader, digital_train, digital_val, load_digital_dataset_from_file
from fleetx.data.bert import IGNORED, DigitalOptions
from fleetx.data.checks import check_choice, check_whole
from fleetx.errors import UsageError


class Pretrained(NamedTuple):
    loss: Tensor
    mask_lm_loss: Tensor
    next_sent_acc: Tensor


class Bert(Application):
    """BERT as `transformers` has it; its weights go by the names of `BertForPreTraining`.

    The vocabulary is applied to the masked words alone. They are said in one of two ways:
    - `mask_pos` is a column (n, 1), or (n,), of places in the flattened batch, row * length + place, and `mask_label`
      is as long: what Paddle's loaders feed. Such a batch cannot be cut into micro-batches.
    - `mask_pos` is (batch, m) with m > 1, of places in each row, and so is `mask_label`, where -100 fills up rows that
      have fewer: this works under pipeline too, whose micro-batches are means over their own masked words each.
    """

    outputs = Pretrained._fields
    sizes: ClassVar[tuple[int, int]]  # layers, hidden
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
        """lang decides the vocab_size; heads are hidden / 64 and ffn is 4 * hidden, where they are not said."""
        super().__init__(unknown)
        check_choice("lang", lang, tuple(self.vocabularies))
        layers = self.sizes[0] if layers is None else layers
        hidden = self.sizes[1] if hidden is None else hidden
        vocab_size = self.vocabularies[lang] if vocab_size is None else vocab_size
        check_whole(layers=layers, hidden=hidden, vocab_size=vocab_size, max_seq_len=max_seq_len)
        heads = max(1, hidden // 64) if heads is None else heads
        ffn = 4 * hidden if ffn is None else ffn
        check_whole(heads=heads, ffn=ffn)
        check_heads(hidden, heads)
        check_dropout(dropout)
        self.lang, self.max_seq_len, self.vocab_size, self._layers = lang, max_seq_len, vocab_size, layers
        need_transformers(self)
        from transformers import BertConfig, BertForPreTraining

        config = BertConfig(
            vocab_size=vocab_size,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=ffn,
            max_position_embeddings=max_seq_len,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        made = BertForPreTraining(config)
        self.bert, self.cls = made.bert, made.cls
        self.pick, self.score = Pick(), Score()

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
        src_ids: Tensor,  # (batch, length), or with a last dimension of 1, as all of these
        pos_ids: Tensor,
        sent_ids: Tensor,
        input_mask: Tensor,  # 1 for words, 0 for what fills up
        mask_label: Tensor,
        mask_pos: Tensor,
        labels: Tensor,  # (batch, 1) or (batch,)
    ) -> Pretrained:
        batch, length = src_ids.shape[:2]
        if length > self.max_seq_len:
            raise UsageError(
                f"src_ids has {length} words a row, and this BERT was made with max_seq_len={self.max_seq_len}"
            )
        if mask_label.numel() != mask_pos.numel():
            raise UsageError(
                f"mask_label has {mask_label.numel()} entries and mask_pos {mask_pos.numel()}: each place has one label"
            )
        out = self.bert(
            src_ids.reshape(batch, length),
            attention_mask=input_mask.reshape(batch, length).long(),
            token_type_ids=sent_ids.reshape(batch, length),
            position_ids=pos_ids.reshape(batch, length),
        )
        words = self.cls.predictions(self.pick(out.last_hidden_state, mask_pos))
        next_sent = self.cls.seq_relationship(out.pooler_output)
        found: Pretrained = self.score(words, next_sent, mask_label, labels)
        return found

    # --- its data ---------------------------------------------------------------------------------
    def load_digital_dataset_from_file(
        self,
        data_dir: str | Path,
        vocab_path: str | Path,
        batch_size: int = 16,
        max_seq_len: int | None = None,
        in_tokens: bool = False,
        shuffle: bool = True,
        **options: Unpack[DigitalOptions],
    ) -> Loader:
        """All files of a folder; as in `fleetx.data`. max_seq_len is 128, or the model's if that is less."""
        length, form = self._length(max_seq_len, 128), in_form(options, vocab_size=self.vocab_size)
        return load_digital_dataset_from_file(data_dir, vocab_path, batch_size, length, in_tokens, shuffle, **form)

    def get_train_dataloader(
        self,
        data_dir: str | Path,
        batch_size: int = 4096,
        max_seq_len: int | None = None,
        in_tokens: bool = True,
        shuffle: bool = True,
        **options: Unpack[DigitalOptions],
    ) -> Loader:
        """The files that train.txt in a folder lists; batch_size counts tokens; max_seq_len is 512, or the model's."""
        length, form = self._length(max_seq_len, 512), in_form(options, vocab_size=self.vocab_size)
        return digital_train(data_dir, batch_size, length, in_tokens, shuffle, **form)

    def get_val_dataloader(
        self,
        data_dir: str | Path,
        batch_size: int = 4096,
        max_seq_len: int | None = None,
        in_tokens: bool = True,
        shuffle: bool = False,
        **options: Unpack[DigitalOptions],
    ) -> Loader:
        """The files that val.txt in a folder lists; each rank gets its share of them, unless shard=False."""
        length, form = self._length(max_seq_len, 512), in_form(options, vocab_size=self.vocab_size)
        return digital_val(data_dir, batch_size, length, in_tokens, shuffle, **form)

    def _length(self, asked: int | None, usual: int) -> int:
        if asked is not None and asked > self.max_seq_len:
            raise UsageError(f"max_seq_len = {asked}: this model was made with max_seq_len = {self.max_seq_len}")
        return min(usual, self.max_seq_len) if asked is None else asked

    def paddle_names(self) -> dict[str, list[str]]:
        found = dict(_NAMES)
        layers = {f"bert.encoder.layer.{i}.{name}": f"encoder_layer_{i}_{paddle}"
                  for i in range(self._layers) for name, paddle in _LAYER.items()}  # fmt: skip
        for name, paddle in (_MODULES | layers).items():
            weight, bias = ("_scale", "_bias") if paddle.endswith("layer_norm") else (".w_0", ".b_0")
            found |= {f"{name}.weight": paddle + weight, f"{name}.bias": paddle + bias}
        return {name: [paddle] for name, paddle in found.items()}


# These two are modules although they have no weights: so a pipeline sees what passes from one module to the next, and
# finds by itself where it may cut.
class Pick(nn.Module):
    def forward(self, hidden: Tensor, places: Tensor) -> Tensor:
        """What stands at these places: (n, hidden) for places in the batch, (batch, m, hidden) for places in rows."""
        if places.dim() == 1 or places.shape[1:].numel() == 1:
            return hidden.flatten(0, 1)[places.reshape(-1)]
        if len(places) != len(hidden):
            raise UsageError(
                f"mask_pos has {len(places)} rows and the batch {len(hidden)}: pass places in each row, or one column "
                "of places in the flattened batch"
            )
        rows = torch.arange(len(hidden), device=places.device)[:, None]
        return hidden[rows, places.flatten(1)]


class Score(nn.Module):
    def forward(self, words: Tensor, next_sent: Tensor, mask_label: Tensor, labels: Tensor) -> Pretrained:
        mask_lm_loss = cross_entropy(words.flatten(0, -2), mask_label.reshape(-1), ignore_index=IGNORED)
        labels = labels.reshape(-1)
        with torch.no_grad():
            next_sent_acc = (next_sent.argmax(-1) == labels).float().mean()
        loss = mask_lm_loss + cross_entropy(next_sent, labels)
        return Pretrained(loss, mask_lm_loss.detach(), next_sent_acc)


# The names of parameters in Paddle's static BERT.
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


class Bert_base(BertBase):  # noqa: N801
    """The older name. It had no language, so its vocabulary has room for either."""

    vocabularies = {"ch": 30522, "en": 30522}


class Bert_large(BertLarge):  # noqa: N801
    """The older name. It had no language, so its vocabulary has room for either."""

    vocabularies = {"ch": 30522, "en": 30522}
