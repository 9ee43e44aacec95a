"""Naju models under the Hugging Face protocol: the plain backbone, wrapped.

Weights keep their plain names below `model.backbone`; a plain `head` is `lm_head` or `score` here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast, SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from naju.hf.cache import NajuCache
from naju.hf.configuration_naju import NajuConfig
from naju.layers.layout import real_tokens
from naju.layers.only_a_matrix import is_watched
from naju.models import Backbone, Classifier, LanguageModel, ModelState
from naju.models.block import Block
from naju.models.pooling import pooled

Wrapped = TypeVar("Wrapped", bound=PreTrainedModel)


class NajuBlock(GradientCheckpointingLayer, Block):
    """A block that can forget its activations and compute them again."""


class NajuPreTrainedModel(PreTrainedModel):
    config_class = NajuConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NajuBlock"]  # noqa: RUF012 (the base has it without ClassVar)
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _is_stateful = True

    @property
    def base(self) -> NajuModel:
        return self.base_model  # type: ignore[return-value]

    def get_input_embeddings(self) -> nn.Module:
        return self.base.backbone.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base.backbone.embedding = value  # type: ignore[assignment]

    def initialize_weights(self) -> None:
        """The backbone, where not all of it was loaded, starts as a plain one does; then come the heads."""
        backbone = self.base.backbone
        if not all(map(_is_loaded, backbone.parameters())):
            _start_as(backbone, Backbone(self.config.to_plain(), self.base.embedding_std))
        super().initialize_weights()

    def _init_weights(self, module: nn.Module) -> None:
        """Of a head, or of an embedding that is resized."""
        if isinstance(module, nn.Linear) and not _is_loaded(module.weight):
            _start_as(module, nn.Linear(module.in_features, module.out_features, bias=module.bias is not None))
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.base.embedding_std)


class NajuModel(NajuPreTrainedModel):
    """Tokens (b, l) to normalised features (b, l, m). `embedding_std` is for a head that has its own usual choice."""

    def __init__(self, config: NajuConfig, embedding_std: float | None = None) -> None:
        super().__init__(config)
        usual = 0.02 if config.tie_word_embeddings else 1.0
        wanted = embedding_std if config.embedding_std is None else config.embedding_std
        self.embedding_std: float = usual if wanted is None else wanted
        self.backbone = Backbone(config.to_plain(), self.embedding_std)
        self.backbone.blocks = nn.ModuleList(
            NajuBlock(block.mixer, config.norm_eps)  # type: ignore[arg-type]
            for block in self.backbone.blocks
        )
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: NajuCache | None = None,
        inputs_embeds: None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        position_ids: Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """`attention_mask` may cover the tokens behind `past_key_values` too; only its end is read. `cu_seq_lens_q`, as
        collators that pack sequences call it, is `cu_seqlens` elsewhere here; nothing is kept of such a batch. Without
        it, and without a mask, one row of `position_ids` that begins anew says as much; else they are not needed."""
        tokens, cache = _checked(input_ids, past_key_values, inputs_embeds)
        self._check_weights(tokens)
        if cu_seq_lens_q is None and attention_mask is None and cache.state is None:
            cu_seq_lens_q = _boundaries(position_ids, tokens)
        mask = None if cu_seq_lens_q is not None else _mask_of(attention_mask, tokens, goes_on=cache.state is not None)
        records = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        with _outputs_of((self.backbone.embedding, *self.backbone.blocks) if records else ()) as outputs:
            features, state = self._read(tokens, cache.state, mask, cu_seq_lens_q, may_step=not records)
        keeps = cu_seq_lens_q is None and self._keeps_cache(use_cache)
        if keeps:
            cache.advance(state, tokens.shape[1])
        hidden: list[Any] = [torch.cat(pieces, dim=1) for pieces in outputs]
        return BaseModelOutputWithPast(
            last_hidden_state=features,
            past_key_values=cache if keeps else None,
            hidden_states=(*hidden[:-1], features) if records else None,
        )

    def _read(
        self, tokens: Tensor, state: ModelState | None, mask: Tensor | None, cu_seqlens: Tensor | None, may_step: bool
    ) -> tuple[Any, ModelState]:
        """Features (b, l, m) and the state after them. A step calls no block as a whole: nothing could watch it."""
        may_step = may_step and not self._is_watched()
        if may_step and tokens.shape[1] == 1 and state is not None and mask is None and cu_seqlens is None:
            feature, state = self.backbone.step(tokens.squeeze(1), state)
            return feature.unsqueeze(1), state
        return self.backbone(tokens, state, mask, cu_seqlens)  # type: ignore[no-any-return]

    def _is_watched(self) -> bool:
        """Whether somebody has to see every call of the backbone, a block or a mixer."""
        blocks = self.backbone.blocks
        modules = (self.backbone, *blocks, *(block.mixer for block in blocks))
        return any(map(is_watched, modules))

    def _check_weights(self, tokens: Tensor) -> None:
        """Layers here read the weights of their parts, which offloading brings only to a module that is called."""
        if not tokens.is_meta and any(next(block.parameters()).is_meta for block in self.backbone.blocks):
            raise ValueError(
                "some blocks have no weights here: a model that is offloaded to another memory or a disk cannot run; "
                "load it without `device_map`, or with one that has devices only"
            )

    def _keeps_cache(self, wanted: bool | None) -> bool:
        if self.config.bidirectional:
            return False
        return self.config.use_cache and not self.training if wanted is None else wanted


class NajuForCausalLM(NajuPreTrainedModel, GenerationMixin):
    """Next-token logits; what `naju.LanguageModel` is in plain torch."""

    _tied_weights_keys = {"lm_head.weight": "model.backbone.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: NajuConfig) -> None:
        super().__init__(config)
        if config.bidirectional:
            raise ValueError("a language model predicts the next token and cannot be bidirectional")
        self.model = NajuModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `generate` would make a cache of keys and values; the first forward pass makes ours

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *rest: Any) -> Any:
        """Reading a prompt in pieces begins with a cache."""
        if generation_config.prefill_chunk_size is not None and generation_config.use_cache is not False:
            model_kwargs.setdefault("past_key_values", NajuCache())
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *rest)  # type: ignore[misc]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: NajuCache | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """`kwargs` are NajuModel's and the loss function's; `logits_to_keep` spares the logits of all but the last."""
        read = self.model(input_ids, attention_mask, past_key_values, return_dict=True, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(read.last_hidden_state[:, kept])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=read.past_key_values, hidden_states=read.hidden_states
        )

    @classmethod
    def from_plain(cls, model: LanguageModel, **others: Any) -> Self:
        """A copy of a plain model; `others` are fields that only a NajuConfig has, such as token ids."""
        wrapped = _without_values(cls, NajuConfig.from_plain(model.config, **others))
        _take_over(wrapped.model.backbone, model.backbone)
        if model.head is not None:
            _take_over(wrapped.lm_head, model.head)
        wrapped.tie_weights()
        wrapped.train(model.training)
        return wrapped

    def to_plain(self) -> LanguageModel:
        """A plain copy of this model."""
        with torch.device("meta"):
            model = LanguageModel(self.config.to_plain())
        _take_over(model.backbone, self.model.backbone)
        if model.head is not None:
            _take_over(model.head, self.lm_head)
        return model.train(self.training)


class NajuForSequenceClassification(NajuPreTrainedModel):
    """One answer a sequence; what `naju.Classifier` is in plain torch.

    Padding is where `attention_mask` is 0 or, without one, where `pad_token_id` stands.
    """

    accepts_loss_kwargs = False  # the loss is a mean over a batch, which Trainer then divides by the batches it gathers

    def __init__(self, config: NajuConfig) -> None:
        super().__init__(config)
        assert config.num_labels is not None
        self.num_labels = config.num_labels
        self.model = NajuModel(config, embedding_std=1.0)
        self.score = nn.Linear(config.d_model, self.num_labels)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        if attention_mask is None and input_ids is not None and self.config.pad_token_id is not None:
            attention_mask = input_ids != self.config.pad_token_id
        read = self.model(input_ids, attention_mask, return_dict=True, **kwargs)
        logits = self.score(pooled(read.last_hidden_state, attention_mask, self.config.pooling))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, logits=logits, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=read.hidden_states)

    @classmethod
    def from_plain(cls, model: Classifier, **others: Any) -> Self:
        """A copy of a plain classifier; `others` are fields that only a NajuConfig has, such as `id2label`."""
        config = NajuConfig.from_plain(model.config, **({"num_labels": model.head.out_features} | others))
        wrapped = _without_values(cls, config)
        _take_over(wrapped.model.backbone, model.backbone)
        _take_over(wrapped.score, model.head)
        wrapped.train(model.training)
        return wrapped

    def to_plain(self) -> Classifier:
        """A plain copy of this classifier."""
        with torch.device("meta"):
            model = Classifier(self.config.to_plain(), self.num_labels)
        _take_over(model.backbone, self.model.backbone)
        _take_over(model.head, self.score)
        return model.train(self.training)


def _without_values(kind: type[Wrapped], config: NajuConfig) -> Wrapped:
    with torch.device("meta"):
        return kind(config)


def _take_over(module: nn.Module, source: nn.Module) -> None:
    """Copies of the source's values, precision and device included, in place of the module's own."""
    copies = {name: tensor.detach().clone() for name, tensor in source.state_dict().items()}
    module.load_state_dict(copies, assign=True)


def _start_as(module: nn.Module, fresh: nn.Module) -> None:
    """Give the values of a fresh module to every parameter that was not loaded; from now on it counts as loaded."""
    for name, parameter in module.named_parameters():
        init.copy_(parameter, fresh.get_parameter(name))
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]


def _is_loaded(parameter: Tensor) -> bool:
    return getattr(parameter, "_is_hf_initialized", False)


def _checked(tokens: Tensor | None, cache: Any, embeddings: Any) -> tuple[Tensor, NajuCache]:
    """The tokens and the cache to go on from, after refusing what these models do not read."""
    if tokens is None or embeddings is not None:
        raise ValueError("input_ids must be given, and inputs_embeds must not: the models read tokens only")
    if cache is not None and not isinstance(cache, NajuCache):
        raise TypeError(f"past_key_values must be a NajuCache, but is a {type(cache).__name__}")
    return tokens, NajuCache() if cache is None else cache


def _mask_of(attention_mask: Tensor | None, tokens: Tensor, *, goes_on: bool) -> Tensor | None:
    """The mask of these tokens; None where all are real, which spares the backbone to sort them."""
    if attention_mask is None:
        return None
    batch, length = tokens.shape
    shape = tuple(attention_mask.shape)
    if len(shape) != 2 or shape[0] != batch or shape[1] < length or (shape[1] > length and not goes_on):
        expected = f"{(batch, length)}{', or more for what was read before' * goes_on}"
        raise ValueError(f"attention_mask must have shape {expected}, but has {shape}")
    mask = real_tokens(attention_mask)[:, -length:]
    return None if not torch.compiler.is_compiling() and bool(mask.all()) else mask


def _boundaries(position_ids: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Where sequences that were packed into one row begin and end, by positions that begin anew."""
    if position_ids is None or tokens.shape[0] != 1 or position_ids.shape != tokens.shape:
        return None
    begins = (position_ids[0, 1:] == 0).nonzero().squeeze(1) + 1
    if len(begins) == 0:
        return None
    return torch.cat([begins.new_tensor([0]), begins, begins.new_tensor([tokens.shape[1]])])


@contextmanager
def _outputs_of(modules: tuple[nn.Module, ...]) -> Iterator[list[list[Tensor]]]:
    """What each module put out, in as many pieces as it was called for."""
    outputs: list[list[Tensor]] = [[] for _ in modules]
    handles = [
        module.register_forward_hook(
            lambda _module, _inputs, out, kept=kept: kept.append(out[0] if isinstance(out, tuple) else out)
        )
        for module, kept in zip(modules, outputs, strict=True)
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
