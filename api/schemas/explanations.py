"""Schema of the explanation of a node's share of new sessions."""

from __future__ import annotations

from pydantic import BaseModel, Field

from controlplane.decide import explain


class FactorSchema(BaseModel):
    """One factor that influences a node's share."""

    name: str = Field(description="state, labels, health, memory, cpu, location or connections.")
    score: float | None = Field(description="0 is best; null: unknown, or not considered.")
    share: float | None = Field(
        description="The fraction of the node's share that remains after this factor; null: the factor does"
        " not reduce shares."
    )
    reason: str = Field(description="An explanation of the factor, as a sentence.")


class ExplanationSchema(BaseModel):
    """Why a node has its share of new sessions."""

    factors: list[FactorSchema] = Field(description="In the order in which they are applied.")
    weight: int = Field(description="The weight published to Envoys; 0: no new sessions.")
    share: float = Field(
        description="Share of the new sessions of its group or, with zone-aware routing, of its zone."
    )
    sentence: str


def to_explanation_schema(explanation: explain.NodeExplanation | None) -> ExplanationSchema | None:
    """Convert an explanation to its schema."""
    if explanation is None:
        return None
    return ExplanationSchema(
        factors=[
            FactorSchema(
                name=factor.name,
                score=factor.score,
                share=None if factor.share is None else round(factor.share, 4),
                reason=factor.reason,
            )
            for factor in explanation.factors
        ],
        weight=explanation.weight,
        share=round(explanation.share, 4),
        sentence=explanation.sentence,
    )
