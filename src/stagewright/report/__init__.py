"""What people look at: tables and figures made of the values that the other parts return."""
