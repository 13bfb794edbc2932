"""The report page's sections: run data in, sections out."""
