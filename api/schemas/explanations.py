"""Why a node has the share of the new sessions that it has, as the API shows it."""

from __future__ import annotations

from pydantic import BaseModel, Field

from controlplane.decide import explain


class FactorSchema(BaseModel):
    """One thing that bears on a node's share."""

    name: str = Field(description="state, labels, health, memory, cpu, location or connections.")
    score: float | None = Field(description="0 is best; null: not known, or it does not count.")
    share: float | None = Field(
        description="What it leaves of the node's share of the sessions; null: it does not act by shares."
    )
    reason: str = Field(description="What it is, as a sentence.")


class ExplanationSchema(BaseModel):
    """Why a node has its share."""

    factors: list[FactorSchema] = Field(description="In the order in which they are taken.")
    weight: int = Field(description="What Envoys are told; 0: no new sessions.")
    share: float = Field(
        description="Of the new sessions of its group or, where Envoys keep to their zone, of those there."
    )
    sentence: str


def to_explanation_schema(explanation: explain.NodeExplanation | None) -> ExplanationSchema | None:
    """An explanation as the API shows it."""
    if explanation is None:
        return None
    return ExplanationSchema(
        factors=[
            FactorSchema(
                name=each.name,
                score=each.score,
                share=None if each.share is None else round(each.share, 4),
                reason=each.reason,
            )
            for each in explanation.factors
        ],
        weight=explanation.weight,
        share=round(explanation.share, 4),
        sentence=explanation.sentence,
    )
