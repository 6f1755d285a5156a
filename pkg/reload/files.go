package reload

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel/pkg/tunnel"
)

// Files is all the certificate files of a process, as the module "certificates". It is built
// by one goroutine, and not added to once it runs.
type Files struct {
	log *slog.Logger
	all []use
}

// use is where some files are configured, and the files.
type use struct {
	name string
	*followed
}

var _ tunnel.Module = (*Files)(nil)

// NewFiles returns no files yet.
func NewFiles(log *slog.Logger) *Files { return &Files{log: log} }

// Pair adds a certificate and its key. name is where they are configured, such as
// "mode.cloud.https": it stands in errors, in notes and in metrics, so it names neither
// a node nor a path.
func (f *Files) Pair(name, certFile, keyFile string) (*Pair, error) {
	p, err := NewPair(certFile, keyFile, f.log.With("module", f.Name(), "use", name))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	f.all = append(f.all, use{name, &p.followed})
	return p, nil
}

// Pool adds the certificates of authorities. name is as for Pair.
func (f *Files) Pool(name, file string) (*Pool, error) {
	p, err := NewPool(file, f.log.With("module", f.Name(), "use", name))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	f.all = append(f.all, use{name, &p.followed})
	return p, nil
}

// Name implements tunnel.Module.
func (f *Files) Name() string { return "certificates" }

// Routes implements tunnel.Module.
func (f *Files) Routes() map[string]tunnel.Handler { return nil }

// Run implements tunnel.Module: it follows the files until ctx is done.
func (f *Files) Run(ctx context.Context) error {
	var all []*followed
	for _, u := range f.all {
		all = append(all, u.followed)
	}
	follow(ctx, Watch, f.log.With("module", f.Name()), all...)
	return nil
}

// Note says which files are bad, or hold what is about to expire; "" if none.
func (f *Files) Note() string {
	var notes []string
	for _, u := range f.all {
		if note := u.Note(); note != "" {
			notes = append(notes, u.name+": "+note)
		}
	}
	return strings.Join(notes, "; ")
}

// expiration is named as Kubernetes' components and cert-manager name theirs.
var expiration = prometheus.NewDesc("tunnel_certificate_expiration_timestamp_seconds", //nolint:gochecknoglobals // it never changes
	"When the certificate in use expires (of authorities: the last of them), by where its file is configured. Unix time.", []string{"use"}, nil)

// Collector returns the metrics of the files.
func (f *Files) Collector() prometheus.Collector { return collector{f} }

type collector struct{ *Files }

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) { ch <- expiration }

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	for _, u := range c.all {
		until := u.validity().until
		ch <- prometheus.MustNewConstMetric(expiration, prometheus.GaugeValue, float64(until.Unix()), u.name)
	}
}
