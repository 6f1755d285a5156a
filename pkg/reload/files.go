package reload

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Files holds all certificate files of a process. It is the module "certificates". One goroutine
// builds it; nothing is added after Run has started.
type Files struct {
	// Set before Run.
	log *slog.Logger
	all []entry
}

// entry is the files of one Pair or Pool. name is the place in the configuration that names them.
type entry struct {
	name string
	*followed
}

var _ tunnel.Module = (*Files)(nil)

// NewFiles returns an empty set of files.
func NewFiles(log *slog.Logger) *Files { return &Files{log: log} }

// Pair adds a certificate and its key. name says where the configuration names the files, such as
// "mode.cloud.https". It appears in errors, notes and metrics, so it must name neither a node nor a
// path.
func (f *Files) Pair(name, certFile, keyFile string) (*Pair, error) {
	p, err := NewPair(certFile, keyFile, f.log.With("module", f.Name(), "use", name))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	f.all = append(f.all, entry{name, &p.followed})
	return p, nil
}

// Pool adds the certificates of authorities (CAs). name is as for Pair.
func (f *Files) Pool(name, file string) (*Pool, error) {
	p, err := NewPool(file, f.log.With("module", f.Name(), "use", name))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	f.all = append(f.all, entry{name, &p.followed})
	return p, nil
}

// Name implements tunnel.Module.
func (f *Files) Name() string { return "certificates" }

// Run implements tunnel.Module. It follows the files until ctx is done.
func (f *Files) Run(ctx context.Context) error {
	var all []*followed
	for _, u := range f.all {
		all = append(all, u.followed)
	}
	follow(ctx, Watch, f.log.With("module", f.Name()), all...)
	return nil
}

// Note says which files are bad or hold a certificate that expires soon; "" if there are none.
func (f *Files) Note() string {
	var notes []string
	for _, u := range f.all {
		if note := u.Note(); note != "" {
			notes = append(notes, u.name+": "+note)
		}
	}
	return strings.Join(notes, "; ")
}

// expiration has a name in the style of the same metrics of Kubernetes' components and cert-manager.
var (
	expiration = prometheus.NewDesc( //nolint:gochecknoglobals // never changes
		"tunnel_certificate_expiration_timestamp_seconds",
		"Expiry of the certificate in use (of authorities: the last expiry), as Unix time in seconds, "+
			"by the use of its file in the configuration.", []string{"use"}, nil)
	start = prometheus.NewDesc( //nolint:gochecknoglobals // never changes
		"tunnel_certificate_start_timestamp_seconds",
		"Start of the validity of that certificate, as Unix time in seconds, by the use of its file in the configuration.",
		[]string{"use"}, nil)
)

// Collector returns the metrics of the files.
func (f *Files) Collector() prometheus.Collector { return collector{f} }

type collector struct{ *Files }

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	ch <- expiration
	ch <- start
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	for _, u := range c.all {
		v := u.validity()
		ch <- prometheus.MustNewConstMetric(expiration, prometheus.GaugeValue, float64(v.until.Unix()), u.name)
		ch <- prometheus.MustNewConstMetric(start, prometheus.GaugeValue, float64(v.from.Unix()), u.name)
	}
}
