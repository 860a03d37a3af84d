"""Pure decisions: from facts, intents and policy to a plan. No I/O, no clock."""
