"""Tables, figures, the report page and the live page, made from the values that other packages return."""
