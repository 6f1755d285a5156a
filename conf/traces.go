package conf

import (
	"net/url"
	"strings"
)

// Traces configures the traces of a cloud, [mode.cloud.traces].
type Traces struct {
	Endpoint   string // URL to which the cloud sends spans by OTLP over HTTP; "": off
	PerMillion int    // how many of a million conns begin a trace, if their callers have sent no trace context
}

const (
	cloudTracesTable = "mode.cloud.traces."
	// tracesPath is the path at which collectors receive traces by OTLP over HTTP.
	tracesPath = "/v1/traces"
)

// collector returns the URL to which the process sends spans, for text, the value of the key endpoint of a table. "":
// off.
func (r *report) collector(table, text string) string {
	if text == "" {
		return ""
	}
	u, err := url.Parse(text)
	key := table + "endpoint"
	switch {
	case err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "":
		r.add(key, "not the URL of an OpenTelemetry collector: write one such as \"http://collector:4318\"")
		return text
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		r.add(key, "a user, a query or a fragment has no use here: write a URL such as \"http://collector:4318\"")
		return text
	}
	if strings.TrimRight(u.Path, "/") == "" {
		u.Path = tracesPath
	}
	return u.String()
}

// checkTraces reports problems of [mode.cloud.traces].
func (c *Cloud) checkTraces(r *report) {
	const key, most = cloudTracesTable + "permillion", 1_000_000
	switch n := c.Traces.PerMillion; {
	case n < 0 || n > most:
		r.add(key, "%d is not from 1 to %d: write how many of a million conns shall begin a trace", n, most)
	case n != 0 && c.Traces.Endpoint == "":
		r.add(key, "there is no endpoint: write one, such as endpoint = \"http://collector:4318\", or remove this key")
	case n == 0 && c.Traces.Endpoint != "" && len(c.HTTPS.Ports) == 0:
		r.add(key, "missing, so nothing is traced: only callers of [mode.cloud.https] can send a trace; "+
			"write how many of a million conns shall begin one, such as permillion = 10000")
	}
}
