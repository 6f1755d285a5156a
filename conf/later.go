package conf

// A file may hold every key of the design, but not every module is here yet. A
// configured module that does not exist would be a promise that nobody keeps, so it
// is an error. The issue that adds a module deletes its row, and nothing else.

// later is a table of the file whose module is missing.
type later struct {
	table string
	keys  []string // those of the table that are set, by name
	needs string
	fix   string
}

func (c *Cloud) later() []later {
	var egress []string
	if c.Egress.AgentPort != 0 {
		egress = append(egress, "agentport")
	}
	return []later{{"mode.cloud.egress", egress, "a door for stock konnectivity agents", "remove it"}}
}

func (e *Edge) later() []later {
	k := e.Konnectivity
	return []later{
		{"mode.edge.konnectivity", set(key("servers", k.Servers...), key("ca", k.CA), key("cert", k.Cert), key("key", k.Key), key("tokenfile", k.TokenFile)), "the konnectivity agent", "remove it"},
	}
}

// refuse reports every key of a missing module.
func (r *report) refuse(rows []later) {
	for _, row := range rows {
		for _, k := range row.keys {
			r.add(row.table+"."+k, "needs %s, which this version does not have: %s", row.needs, row.fix)
		}
	}
}

// key returns name when one of its values is not empty, else "".
func key(name string, values ...string) string {
	for _, v := range values {
		if v != "" {
			return name
		}
	}
	return ""
}

// set leaves out the keys that are not set.
func set(keys ...string) []string {
	var names []string
	for _, k := range keys {
		if k != "" {
			names = append(names, k)
		}
	}
	return names
}
