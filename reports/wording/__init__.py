"""The sentences of results: results hold numbers and ids, and each claim is put into a sentence here, once for all media.

`say` says a statement by its id, `requirements` has the titles of checks, `verdict` the headline of a result and its reasons, and
`written` puts the text into JSON. The other modules say the statements, one module for each topic.
"""
