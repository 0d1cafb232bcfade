"""Golden records: outputs of an implementation, kept on a machine that has it and judged again on any other."""
