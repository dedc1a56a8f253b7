"""Reading compiled programs: what XLA made of them, and what that costs."""
