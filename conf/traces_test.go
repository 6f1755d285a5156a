package conf

import (
	"strings"
	"testing"
)

func TestTraces(t *testing.T) {
	for text, want := range map[string]string{
		"":                                 "",
		"http://collector:4318":            "http://collector:4318/v1/traces",
		"https://collector:4318/":          "https://collector:4318/v1/traces",
		"http://[::1]:4318/otlp/v1/traces": "http://[::1]:4318/otlp/v1/traces",
	} {
		r := newReport(nil)
		if got := r.collector(cloudTracesTable, text); got != want || r.err() != nil {
			t.Errorf("%q is %q, %v", text, got, r.err())
		}
	}
	for text, want := range map[string]string{
		"collector:4318":                     "not the URL",
		"grpc://collector:4317":              "not the URL",
		"http://":                            "not the URL",
		"http://%zz":                         "not the URL",
		"http://user:s3cret@collector:4318":  "has no use here",
		"http://collector:4318?token=s3cret": "has no use here",
	} {
		r := newReport(nil)
		r.collector(cloudTracesTable, text)
		if err := r.err(); err == nil || !strings.Contains(err.Error(), "mode.cloud.traces.endpoint: ") ||
			!strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestTracesPerMillion(t *testing.T) {
	ports := HTTPS{Ports: map[string]string{"10250": "127.0.0.1:10250"}}
	for _, tt := range []struct {
		traces Traces
		https  HTTPS
		want   string // part of the problem; "": there is none
	}{
		{Traces{}, HTTPS{}, ""},
		{Traces{"http://c", 1_000_000}, HTTPS{}, ""},
		{Traces{"http://c", 0}, ports, ""},
		{Traces{"http://c", 0}, HTTPS{}, "nothing is traced"},
		{Traces{"", 1}, ports, "there is no endpoint"},
		{Traces{"http://c", 1_000_001}, ports, "is not from 1 to 1000000"},
		{Traces{"http://c", -1}, ports, "is not from 1 to 1000000"},
	} {
		r := newReport(nil)
		(&Cloud{Traces: tt.traces, HTTPS: tt.https}).checkTraces(r)
		if err := r.err(); (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: %v", tt.traces, err)
		}
	}
}
