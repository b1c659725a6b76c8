"""What is loaded: the weights, their context and its limits. Made once from upstream's parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import CLOSED, KVFlashError

if TYPE_CHECKING:
    import llama_cpp
    from llama_cpp._internals import LlamaContext, LlamaModel

    from ..calibration.finder import HeadFinder


class Closed:
    """In place of the context, the model and the tokenizer of a closed model, which would end the process."""

    def __getattr__(self, name: str) -> NoReturn:
        raise KVFlashError(CLOSED)


def weights_of(llm: llama_cpp.Llama) -> LlamaModel:
    """Return upstream's object of a model's weights, which it shows nobody, for a further context on them."""
    return llm._model


class Model:
    """A loaded model, which its texts share.

    weights, context: upstream's parts. n_ctx: most tokens of a text. n_batch: of a call of upstream's. n_ubatch: of a
    step, as llama.cpp has them. logits_all: the logits of all tokens are kept. finder: of retrieval heads; None where
    the policy uses none.
    """

    def __init__(self, llm: llama_cpp.Llama, *, logits_all: bool) -> None:
        self.weights: LlamaModel = weights_of(llm)
        self.context: LlamaContext = llm._ctx
        self.n_ctx: int = llm._n_ctx
        self.n_vocab: int = llm._n_vocab
        self.n_batch: int = llm.n_batch
        self.n_ubatch: int = llm.context_params.n_ubatch or llm.n_batch
        self.n_threads: int = llm.n_threads
        self.logits_all = logits_all
        self.verbose: bool = llm.verbose
        self.finder: HeadFinder | None = None

    def close(self) -> None:
        """Refuse every later use. Upstream frees the parts."""
        closed: Any = Closed()
        self.weights = self.context = closed
