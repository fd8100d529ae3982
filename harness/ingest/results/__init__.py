"""Results that other tools wrote, and assay's own, in one form (`result_set.ResultSet`), and the comparison of two."""
