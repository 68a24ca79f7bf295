"""Reading many prompts at once, every shared beginning once, for models of the Llama family.

The prompts form a prefix tree. Everything but attention runs on its nodes, each one once; for attention the keys,
values and queries of a prompt's nodes are gathered into a padded row. The last layer runs its queries and its MLP on
last positions only, which is most of that layer: a third of all work for a model of two layers.

Shape letters: N nodes of the tree, B prompts, L positions of the longest prompt, H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from longstep_bindings.engines.prefix_tree import build_prefix_trees

if TYPE_CHECKING:
    import torch

__all__ = ["can_prefill_tree", "prefill_tree"]

MODEL_TYPES = frozenset({"llama", "qwen2"})
MAX_FUSED_WEIGHTS = 1 << 20


def can_prefill_tree(model: Any) -> bool:
    """True when `prefill_tree` computes what the model's own forward computes."""
    config = model.config
    if config.model_type not in MODEL_TYPES or len(getattr(model, "hf_device_map", "1")) > 1:
        return False
    if hasattr(model, "get_base_model") and model.active_peft_config.is_prompt_learning:
        return False
    return set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}


def prefill_tree(
    model: Any, sequences: Sequence[NDArray[np.int32]], cache: Any = None
) -> torch.Tensor:
    """Logits [B, V] after the last id of each sequence.

    Args:
        model: A causal language model for which `can_prefill_tree`, perhaps wrapped by peft.
        sequences: B non-empty id sequences.
        cache: Where keys and values [B, ..., L, ...] go, padded on the right; None when they are not needed.
    """
    import torch

    if hasattr(model, "get_base_model"):  # peft has replaced the linear layers inside it
        model = model.get_base_model()
    device, body = model.device, model.model
    lengths_B = np.array([len(sequence) for sequence in sequences])
    tree = build_prefix_trees(sequences, row_length=int(lengths_B.sum()))
    real_BL = np.arange(lengths_B.max()) < lengths_B[:, None]
    nodes_BL = np.zeros(real_BL.shape, dtype=np.int64)
    nodes_BL[real_BL] = tree.nodes
    # For each node, one place in the padded rows where it stands.
    places_N = np.empty(tree.num_nodes, dtype=np.int64)
    places_N[tree.nodes] = np.flatnonzero(real_BL)

    def tensor(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    gather = _Gather(tensor(nodes_BL), tensor(places_N), tensor(lengths_B - 1))
    hidden_NH = body.embed_tokens(tensor(tree.token_ids[0, : tree.num_nodes]))
    position_ids = tensor(tree.position_ids[:, : tree.num_nodes])
    rotation = tuple(part[0] for part in body.rotary_emb(hidden_NH, position_ids))
    for layer in body.layers[:-1]:
        hidden_NH = _layer(layer, hidden_NH, rotation, gather, cache)
    hidden_BH = _last_layer(body.layers[-1], hidden_NH, rotation, gather, cache)
    return model.lm_head(body.norm(hidden_BH))


class _Gather:
    """Index arrays between the nodes of the tree and the padded rows."""

    def __init__(
        self, nodes_BL: torch.Tensor, places_N: torch.Tensor, last_B: torch.Tensor
    ) -> None:
        import torch

        self.nodes_BL, self.places_N = nodes_BL, places_N
        self.last_nodes_B = nodes_BL.gather(1, last_B[:, None]).squeeze(1)
        columns_L = torch.arange(nodes_BL.shape[1], device=nodes_BL.device)
        self.is_real_B11L = (columns_L <= last_B[:, None])[:, None, None]

    def rows(self, states_NHD: torch.Tensor) -> torch.Tensor:
        """[B, heads, L, head_dim] from [N, heads, head_dim]."""
        states_XHD = states_NHD.index_select(0, self.nodes_BL.flatten())
        return states_XHD.unflatten(0, self.nodes_BL.shape).transpose(1, 2)


def _layer(
    layer: Any, hidden_NH: torch.Tensor, rotation: Any, gather: _Gather, cache: Any
) -> torch.Tensor:
    attention = layer.self_attn
    normed_NH = layer.input_layernorm(hidden_NH)
    q_NX, k_NX, v_NX = _project(normed_NH, attention.q_proj, attention.k_proj, attention.v_proj)
    q = gather.rows(_rotate(_heads(q_NX, attention), *rotation))
    k = gather.rows(_rotate(_heads(k_NX, attention), *rotation))
    v = gather.rows(_heads(v_NX, attention))
    if cache is not None:
        cache.update(k, v, attention.layer_idx)
    mixed = _attend(attention, q, k, v, is_causal=True)
    mixed_NX = mixed.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, gather.places_N)
    return _feed_forward(layer, hidden_NH + attention.o_proj(mixed_NX))


def _last_layer(
    layer: Any, hidden_NH: torch.Tensor, rotation: Any, gather: _Gather, cache: Any
) -> torch.Tensor:
    """As `_layer`, but only what the last position of each sequence needs: [B, H]."""
    attention, last_B = layer.self_attn, gather.last_nodes_B
    normed_NH = layer.input_layernorm(hidden_NH)
    k_NX, v_NX = _project(normed_NH, attention.k_proj, attention.v_proj)
    k = gather.rows(_rotate(_heads(k_NX, attention), *rotation))
    v = gather.rows(_heads(v_NX, attention))
    if cache is not None:
        cache.update(k, v, attention.layer_idx)
    q_BHD = _heads(attention.q_proj(normed_NH[last_B]), attention)
    q = _rotate(q_BHD, *(part[last_B] for part in rotation))[:, :, None]
    mixed = _attend(attention, q, k, v, attn_mask=gather.is_real_B11L)
    return _feed_forward(layer, hidden_NH[last_B] + attention.o_proj(mixed.flatten(1)))


def _project(x_NH: torch.Tensor, *linears: Any) -> Sequence[torch.Tensor]:
    """`x_NH` through each of the layers; small plain ones in one multiplication, which is faster."""
    import torch

    is_plain = all(type(linear) is torch.nn.Linear and linear.bias is None for linear in linears)
    if not is_plain or sum(linear.weight.numel() for linear in linears) > MAX_FUSED_WEIGHTS:
        return [linear(x_NH) for linear in linears]
    weight = torch.cat([linear.weight for linear in linears])
    return torch.nn.functional.linear(x_NH, weight).split(
        [linear.out_features for linear in linears], dim=-1
    )


def _heads(x_NX: torch.Tensor, attention: Any) -> torch.Tensor:
    return x_NX.unflatten(-1, (-1, attention.head_dim))


def _rotate(x_NHD: torch.Tensor, cos_ND: torch.Tensor, sin_ND: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, in the half-split form of Llama."""
    import torch

    half = x_NHD.shape[-1] // 2
    turned_NHD = torch.cat([-x_NHD[..., half:], x_NHD[..., :half]], dim=-1)
    return (x_NHD * cos_ND[:, None]).addcmul_(turned_NHD, sin_ND[:, None])


def _attend(
    attention: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **mask: Any
) -> torch.Tensor:
    import torch

    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, scale=attention.scaling, enable_gqa=q.shape[1] != k.shape[1], **mask
    )


def _feed_forward(layer: Any, hidden_NH: torch.Tensor) -> torch.Tensor:
    mlp = layer.mlp
    gate_NX, up_NX = _project(layer.post_attention_layernorm(hidden_NH), mlp.gate_proj, mlp.up_proj)
    return hidden_NH + mlp.down_proj(mlp.act_fn(gate_NX).mul_(up_NX))
