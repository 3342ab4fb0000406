"""Why a place that looks like a delta-rule step is not rewritten: codes, sentences, advice.

Lives here: the closed list of reasons as data, and the exception that carries one through the
matcher. Not here: deciding (delta_rule.py and its neighbours) or printing (explanation.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.fx import Node


@dataclass(frozen=True)
class Explanation:
    """What a reason means, and what an author of a model can change."""

    sentence: str
    advice: str


class Reason(Enum):
    """Reason codes. The name is the code: counted, logged and documented under it."""

    STATE_NOT_INPUT = Explanation(
        "the state that is read and written is computed in the graph, not an input or buffer of it",
        "index and update the pool itself, not a value derived from it",
    )
    STATE_IS_VIEW = Explanation(
        "the state is a view taken inside the graph that cannot be followed back to its input",
        "take layers by pools[l] or unbind, and write into the same view that is read",
    )
    STATE_NOT_WRITTEN_BACK = Explanation(
        "the updated state is returned or dropped instead of being written into the pool",
        "assign it in place: pool[slots] = state, or state.copy_(new)",
    )
    STATE_READ_ELSEWHERE = Explanation(
        "something outside the step reads the pool in the same graph",
        "read the pool before or after the compiled function, or through the step's own result",
    )
    STATE_SNAPSHOT = Explanation(
        "the pool is copied in the same graph before it is updated",
        "take the snapshot outside the compiled function",
    )
    STATE_ALIASED = Explanation(
        "another node of the graph looks at the pool's storage",
        "index the pool only once, in the step",
    )
    STATE_SHAPE = Explanation(
        "the state is not [slots, heads, D, D]",
        "keep the pool four-dimensional, one matrix per slot and head",
    )
    STATE_DTYPE = Explanation(
        "the pool is neither float32 nor bfloat16",
        "keep the pool in float32 or bfloat16",
    )
    HEAD_WIDTH = Explanation(
        "the head width is not 128", "the kernels serve head width 128 for keys and values"
    )
    DYNAMIC_SHAPE = Explanation(
        "the number of heads, the head width or the width of a row is symbolic",
        "mark only the batch dynamic: torch._dynamo.mark_dynamic(x, 0) instead of dynamic=True",
    )
    ACCUMULATES = Explanation(
        "rows of the pool are added to or reduced into (accumulate=True), not replaced",
        "assign the new state: pool[slots] = state",
    )
    INDEX_FORM = Explanation(
        "the pool is indexed by something else than one int32 or int64 tensor [rows]",
        "index the first dimension only, with a one-dimensional integer tensor",
    )
    INDEX_MISMATCH = Explanation(
        "the state is read from other slots than it is written to",
        "use the same index tensor for the read and the write",
    )
    ROWS_MISMATCH = Explanation(
        "the number of indices is not the number of rows",
        "give every row one slot",
    )
    NO_ROWS = Explanation(
        "the graph is compiled for no rows at all", "nothing: such a graph does no work"
    )
    MASKED_ROWS = Explanation(
        "the update of the state is masked row by row, but the output is not, or in another way",
        "set padding rows of the output to zero by the same mask: torch.where(valid, o, 0)",
    )
    INTERMEDIATE_USED = Explanation(
        "something outside the step uses one of its intermediate values",
        "compute that value separately, or drop it",
    )
    ROUNDING = Explanation(
        "a value is rounded where the operator does not round, or the other way round",
        "cast inputs to float32 before the first operation of the step, and keep the state in it",
    )
    NOT_UNDERSTOOD = Explanation(
        "an operation inside the step is not one the pass can read",
        "write the step with elementwise products, sums, einsum or matmul",
    )
    NOT_DELTA_RULE = Explanation(
        "the update of the state is not S*d + beta*(v - (S*d)k) k^T",
        "compare with the formula in docs/operators.md",
    )
    OUTPUT_NOT_FOUND = Explanation(
        "no value of the graph is the new state applied to a normalised q",
        "compute the output from the state after the update, in the same graph",
    )
    NORM_MISSING = Explanation(
        "q or k is not divided by its L2 norm inside the graph",
        "normalise both in the compiled function: x * rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)",
    )
    NORM_EPS = Explanation(
        "the L2 norm of q or k adds another eps than 1e-6", "use eps = 1e-6 inside the root"
    )
    NORM_FORM = Explanation(
        "the L2 norm of q or k handles small norms in another way than eps inside the root "
        "(F.normalize clamps, norm() + eps adds outside)",
        "normalise by x * rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)",
    )
    SCALE_NOT_CONSTANT = Explanation(
        "q or the output is scaled by something that is not a constant of the graph",
        "scale by a Python number",
    )
    BETA_FORM = Explanation(
        "beta is not the sigmoid of a value per row and head",
        "pass logits and take torch.sigmoid of them in float32 in the compiled function",
    )
    GATE_FORM = Explanation(
        "the decay is not exp(-exp(A_log) * softplus(a)) or exp(bound * sigmoid(exp(A_log) * a))",
        "compute the gate from its logits in the compiled function",
    )
    GATE_PER_HEAD = Explanation(
        "the decay is one number per head, not one per key channel",
        "this is gated delta net, which these operators do not serve",
    )
    BOUND_RANGE = Explanation(
        "the lower bound of the gate is not a negative constant", "use a finite bound below zero"
    )
    ARGUMENT_LAYOUT = Explanation(
        "an input of the step cannot be laid out as the operator wants it",
        "give q, k, v, gate and beta the batch as their first dimension",
    )
    ACTIVATION_DTYPE = Explanation(
        "an input of the step is neither bfloat16, float16 nor float32",
        "keep activations in one of these types",
    )
    CONV_MISSING = Explanation(
        "q, k and v are not SiLU of one convolution over a window that the graph reads and writes",
        "convolve q, k and v together over one window, and take SiLU, in the compiled function",
    )
    CONV_FORM = Explanation(
        "the convolution is not depthwise, of width 4, over the last columns of a window",
        "keep one window [slots, channels, columns] with channels q, k, v in order",
    )
    CONV_WINDOW = Explanation(
        "the window does not move by one column with the current token in the last",
        "write torch.cat([window[..., 1:], x[..., None]], -1) back",
    )
    CONV_SLOTS = Explanation(
        "window and state are not kept in the same slots",
        "index both pools with one tensor of slots, or neither",
    )
    OUTPUT_NORM = Explanation(
        "what follows is not RMSNorm(o) * weight * sigmoid(gate), rounded once at the end",
        "normalise the output over each head in float32, and gate it by a sigmoid",
    )
    CONTRACT = Explanation(
        "the operator does not accept the arguments that the step has",
        "the operator's own sentence, above, names the rule",
    )
    ORDER = Explanation(
        "an input of the step depends on what the step produces",
        "compute q, k, v, gate and beta before the state is updated",
    )
    CERTIFICATE = Explanation(
        "the operator and the code it would replace disagree on random inputs",
        "please report this: the pass read the code wrongly and refused to ship it",
    )

    @property
    def sentence(self) -> str:
        """What is the case."""
        return self.value.sentence

    @property
    def advice(self) -> str:
        """What to change."""
        return self.value.advice


class RefusalError(Exception):
    """A step that is left as it is: the reason, the node where it stopped, and the fact there.

    Raised and caught inside the pass; it never reaches a user's compile.
    """

    def __init__(self, reason: Reason, node: Node | None = None, detail: str = "") -> None:
        super().__init__(f"{reason.name}: {reason.sentence}" + (f" ({detail})" if detail else ""))
        self.reason = reason
        self.node = node
        self.detail = detail
