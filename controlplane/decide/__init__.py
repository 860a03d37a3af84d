"""Pure decisions: facts, intents and policy in; a plan out. No I/O, no clock."""
