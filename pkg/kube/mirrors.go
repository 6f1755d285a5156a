package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"tunnel.example/tunnel/pkg/tunnel"
)

// MirrorLease is the name of a Lease in the namespace of the cloud. It elects the replica that writes the twins of
// package mirror.
const MirrorLease = "tunnel-mirror"

// MirrorsConfig says which objects a Mirrors follows.
type MirrorsConfig struct {
	// Annotation marks the Services for which package mirror makes twins. Mirrors only reads them.
	Annotation string
	// Label has the value Value in all twins and their EndpointSlices. Mirrors changes only objects with this label.
	Label, Value string
	// Namespace and Service name the Service of the cloud's own pods. Its endpoints are the replicas.
	Namespace, Service string
}

// Mirrors follows the Services for which package mirror makes twins. It also follows, creates, changes and deletes the
// twins and their EndpointSlices.
type Mirrors struct {
	// Set once.
	cfg      MirrorsConfig
	client   *Client
	counters *tunnel.Counters
	log      *slog.Logger

	mu       sync.Mutex // guards the following, and the maps of the stores
	services mirrorStore[Service]
	slices   mirrorStore[Slice] // the EndpointSlices with the label
	replicas mirrorStore[Slice] // the EndpointSlices of the replicas
	errs     map[string]error   // by API path: why the objects may be out of date; no entry: they are up to date
	changed  tunnel.Change
}

// Object is what Services and EndpointSlices have in common.
type Object struct {
	Namespace, Name string
	UID, Version    string
	Owner           string // UID of the first owner; empty: none
	Labels          map[string]string
	Created         time.Time
}

// Key returns NAMESPACE/NAME.
func (o Object) Key() string { return o.Namespace + "/" + o.Name }

// Service is a Service.
type Service struct {
	Object
	Annotation string // the value of MirrorsConfig.Annotation
	Alias      bool   // the type is ExternalName
	Ports      []ServicePort
}

// ServicePort is a port of a Service or of an EndpointSlice.
type ServicePort struct {
	Name     string `json:"name"`
	Protocol string `json:"protocol"`
	Port     uint16 `json:"port"`
	// Target is the port of the pods. It is 0 if the Service names that port, and in an EndpointSlice.
	Target uint16 `json:"targetPort,omitempty"`
}

// Slice is an EndpointSlice.
type Slice struct {
	Object
	Family    string // IPv4 or IPv6
	Ports     []ServicePort
	Endpoints []SliceEndpoint // sorted
}

// Of returns the name of the slice's Service.
func (s Slice) Of() string { return s.Labels[serviceName] }

// SliceEndpoint is an endpoint of an EndpointSlice that takes connections.
type SliceEndpoint struct {
	Address, Node, Zone string
}

// MirrorView is a snapshot of the objects that a Mirrors follows. The lists are sorted by Key.
type MirrorView struct {
	Services         []Service
	Slices, Replicas []Slice
	Known            bool // all objects have been read once
}

// Mirrors returns a Mirrors that has read nothing before Run. counters counts panics.
func (c *Client) Mirrors(cfg MirrorsConfig, counters *tunnel.Counters, log *slog.Logger) *Mirrors {
	m := &Mirrors{cfg: cfg, client: c, counters: counters, log: log, errs: make(map[string]error)}
	m.services = mirrorStore[Service]{m: m, from: m.service, all: make(map[string]Service)}
	m.slices = mirrorStore[Slice]{m: m, from: sliceFrom, all: make(map[string]Slice)}
	m.replicas = mirrorStore[Slice]{m: m, from: sliceFrom, all: make(map[string]Slice)}
	return m
}

// Run follows the objects until ctx is done.
func (m *Mirrors) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	services := func() runtime.Object { return new(serviceList) }
	slices := func() runtime.Object { return new(sliceList) }
	follow := func(
		path string, list func() runtime.Object, selector string, example runtime.Object, store cache.ReflectorStore,
	) {
		running.Go(func() {
			m.client.followObjects(ctx, m.client.wholeObjects(path, list), metav1.ListOptions{LabelSelector: selector},
				example, store, func(err error) { m.noteResult(path, err) })
		})
	}
	follow(servicesPath, services, "", &serviceObject{}, &m.services)
	follow(endpointSlicesPath, slices, m.selector(), &sliceObject{}, &m.slices)
	follow(endpointSlices(m.cfg.Namespace), slices, labels.Set{serviceName: m.cfg.Service}.String(), &sliceObject{},
		&m.replicas)
}

// selector selects the objects with the label.
func (m *Mirrors) selector() string { return labels.Set{m.cfg.Label: m.cfg.Value}.String() }

// View returns the objects as they are known now.
func (m *Mirrors) View() MirrorView {
	m.mu.Lock()
	defer m.mu.Unlock()
	return MirrorView{
		Services: m.services.sorted(), Slices: m.slices.sorted(), Replicas: m.replicas.sorted(),
		Known: m.services.read && m.slices.read && m.replicas.read,
	}
}

// Changed returns a channel that is closed at the next change of View.
func (m *Mirrors) Changed() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.changed.Next()
}

// Err returns why the objects may be out of date: the last request of a watch has failed. nil: they are up to date.
func (m *Mirrors) Err() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, path := range slices.Sorted(maps.Keys(m.errs)) {
		return fmt.Errorf("%s: %w", path, Explain(m.errs[path]))
	}
	return nil
}

// noteResult stores the outcome of a request. It logs the first failure and the first success after a failure.
func (m *Mirrors) noteResult(path string, err error) {
	m.mu.Lock()
	before := m.errs[path]
	if m.errs[path] = err; err == nil {
		delete(m.errs, path)
	}
	m.mu.Unlock()
	switch {
	case err != nil && before == nil:
		m.log.Warn("what [mode.cloud.services.mirror] needs cannot be read; the twins stay as they are",
			"target", path, "err", Explain(err))
	case err == nil && before != nil:
		m.log.Info("what [mode.cloud.services.mirror] needs can be read again", "target", path)
	}
}

// mirrorStore is the store of a reflector. Mirrors.mu guards it.
type mirrorStore[T any] struct {
	m    *Mirrors
	from func(o any) (T, bool) // converts an object; false: the store does not keep it
	all  map[string]T          // by NAMESPACE/NAME
	read bool                  // all objects have been read once
}

func (s *mirrorStore[T]) Add(o any) error    { return s.set(o, true) }
func (s *mirrorStore[T]) Update(o any) error { return s.set(o, true) }
func (s *mirrorStore[T]) Delete(o any) error { return s.set(o, false) }
func (s *mirrorStore[T]) Resync() error      { return nil }

// set adds, changes or removes an object.
func (s *mirrorStore[T]) set(o any, present bool) error {
	key, err := keyOf(o)
	if err != nil {
		return err
	}
	now, kept := s.decode(key, o)
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	_, was := s.all[key]
	switch {
	case present && kept:
		s.all[key] = now
	case was:
		delete(s.all, key)
	default:
		return nil
	}
	s.m.changed.Notify()
	return nil
}

// decode calls from, and recovers its panics: client-go would end the process at a panic, and users write the objects.
// The store does not keep an object that causes a panic.
func (s *mirrorStore[T]) decode(key string, o any) (now T, kept bool) {
	read := func() error { now, kept = s.from(o); return nil }
	//nolint:errcheck // it is logged
	tunnel.Guard(s.m.log, s.m.counters, "the object "+key+" counts as deleted", read)
	return now, kept
}

// Replace replaces all objects: the reflector calls it with each complete list.
func (s *mirrorStore[T]) Replace(objects []any, _ string) error {
	all := make(map[string]T)
	for _, o := range objects {
		key, err := keyOf(o)
		if err != nil {
			return err
		}
		if now, kept := s.decode(key, o); kept {
			all[key] = now
		}
	}
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	s.all, s.read = all, true
	s.m.changed.Notify()
	return nil
}

func (s *mirrorStore[T]) sorted() (all []T) {
	for _, key := range slices.Sorted(maps.Keys(s.all)) {
		all = append(all, s.all[key])
	}
	return all
}

// maxAnnotation is how many bytes of the annotation of a Service are kept: more than the name of a Service has. A user
// may write 256 KiB.
const maxAnnotation = 64

// objectFrom returns the fields that Services and EndpointSlices have in common.
func objectFrom(meta *metav1.ObjectMeta) Object {
	o := Object{
		Namespace: meta.Namespace, Name: meta.Name, UID: string(meta.UID), Version: meta.ResourceVersion,
		Labels: meta.Labels, Created: meta.CreationTimestamp.Time,
	}
	if len(meta.OwnerReferences) > 0 {
		o.Owner = string(meta.OwnerReferences[0].UID)
	}
	return o
}

// service converts a Service, and reports whether the Service has the annotation or the label.
func (m *Mirrors) service(o any) (Service, bool) {
	s, ok := o.(*serviceObject)
	if !ok {
		return Service{}, false
	}
	annotation, annotated := s.Annotations[m.cfg.Annotation]
	if !annotated && s.Labels[m.cfg.Label] != m.cfg.Value {
		return Service{}, false
	}
	annotation = strings.Clone(annotation[:min(len(annotation), maxAnnotation)])
	now := Service{
		Annotation: annotation,
		Object:     objectFrom(&s.ObjectMeta), Alias: s.Spec.Type == typeExternalName,
	}
	for _, p := range s.Spec.Ports {
		now.Ports = append(now.Ports, ServicePort{
			Name: p.Name, Protocol: cmp.Or(p.Protocol, defaultProtocol), Port: uint16(p.Port),
			Target: uint16(p.TargetPort.IntValue()),
		})
	}
	return now, true
}

// sliceFrom converts an EndpointSlice of IP addresses. It keeps only the ready endpoints, even if the Service publishes
// endpoints that are not ready (publishNotReadyAddresses).
func sliceFrom(o any) (Slice, bool) {
	s, ok := o.(*sliceObject)
	if !ok || s.AddressType != addressTypeIPv4 && s.AddressType != addressTypeIPv6 {
		return Slice{}, false
	}
	now := Slice{Object: objectFrom(&s.ObjectMeta), Family: s.AddressType}
	for _, p := range s.Ports {
		if p.Name != nil {
			now.Ports = append(now.Ports, ServicePort{
				Name: *p.Name, Protocol: cmp.Or(p.Protocol, defaultProtocol), Port: uint16(p.Port),
			})
		}
	}
	for _, e := range s.Endpoints {
		serving := e.Conditions.Serving
		if serving == nil {
			serving = e.Conditions.Ready
		}
		down := serving != nil && !*serving || e.Conditions.Terminating != nil && *e.Conditions.Terminating
		if down || len(e.Addresses) == 0 {
			continue
		}
		if _, err := netip.ParseAddr(e.Addresses[0]); err == nil {
			now.Endpoints = append(now.Endpoints, SliceEndpoint{e.Addresses[0], e.NodeName, e.Zone})
		}
	}
	slices.SortFunc(now.Endpoints, func(a, b SliceEndpoint) int { return cmp.Compare(a.Address, b.Address) })
	return now, true
}

// ownedObject holds the fields of a Service or an EndpointSlice that Mirrors writes.
type ownedObject struct {
	APIVersion string    `json:"apiVersion,omitempty"`
	Kind       string    `json:"kind,omitempty"`
	Metadata   ownedMeta `json:"metadata"`
	// Of a Service.
	Spec *ownedSpec `json:"spec,omitempty"`
	// Of an EndpointSlice.
	AddressType string          `json:"addressType,omitempty"`
	Ports       []ServicePort   `json:"ports,omitempty"`
	Endpoints   []ownedEndpoint `json:"endpoints,omitzero"`
}

type ownedMeta struct {
	Name            string                  `json:"name"`
	Namespace       string                  `json:"namespace"`
	ResourceVersion string                  `json:"resourceVersion,omitempty"`
	Labels          map[string]string       `json:"labels,omitempty"`
	OwnerReferences []metav1.OwnerReference `json:"ownerReferences,omitempty"`
}

type ownedSpec struct {
	IPFamilyPolicy string        `json:"ipFamilyPolicy,omitempty"`
	Ports          []ServicePort `json:"ports"`
}

type ownedEndpoint struct {
	Addresses  []string        `json:"addresses"`
	Conditions map[string]bool `json:"conditions"`
	NodeName   string          `json:"nodeName,omitempty"`
	Zone       string          `json:"zone,omitempty"`
}

// meta returns the metadata for the creation of o. owner is the Service that owns o.
func (m *Mirrors) meta(o Object, owner Service) ownedMeta {
	all := maps.Clone(o.Labels)
	all[m.cfg.Label] = m.cfg.Value
	return ownedMeta{Name: o.Name, Namespace: o.Namespace, Labels: all, OwnerReferences: []metav1.OwnerReference{
		{APIVersion: "v1", Kind: "Service", Name: owner.Name, UID: types.UID(owner.UID)},
	}}
}

// at returns the metadata for a patch of o. The patch fails if o has changed since it was read.
func at(o Object) ownedMeta {
	return ownedMeta{Name: o.Name, Namespace: o.Namespace, ResourceVersion: o.Version}
}

// ErrTaken is the error of a creation if another object has the name, and does not have the label.
var ErrTaken = errors.New("it exists, and this cloud has not made it")

// CreateService creates a Service without selector, with the label, that belongs to owner.
func (m *Mirrors) CreateService(ctx context.Context, s, owner Service) error {
	o := ownedObject{
		APIVersion: "v1", Kind: "Service", Metadata: m.meta(s.Object, owner),
		Spec: &ownedSpec{IPFamilyPolicy: "PreferDualStack", Ports: s.Ports},
	}
	return m.create(ctx, servicesIn(s.Namespace), o)
}

// CreateSlice creates an EndpointSlice of the Service owner, with the label.
func (m *Mirrors) CreateSlice(ctx context.Context, s Slice, owner Service) error {
	o := ownedSlice(s, m.meta(s.Object, owner))
	o.APIVersion, o.Kind, o.AddressType = "discovery.k8s.io/v1", "EndpointSlice", s.Family
	o.Metadata.Labels[serviceName] = owner.Name
	o.Metadata.Labels["endpointslice.kubernetes.io/managed-by"] = "tunnel-cloud"
	return m.create(ctx, endpointSlices(s.Namespace), o)
}

// create creates an object. If an object with this name and the label exists, that is no error: the watch is about to
// report the object.
func (m *Mirrors) create(ctx context.Context, collection string, o ownedObject) error {
	err := m.client.twins.create(ctx, collection, o, new(object))
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	var there ownedObject
	if err = m.client.twins.get(ctx, path.Join(collection, o.Metadata.Name), &there); err != nil {
		return err
	}
	if there.Metadata.Labels[m.cfg.Label] != m.cfg.Value {
		return ErrTaken
	}
	return nil
}

// PatchService changes the ports of a Service, if the Service has not changed since it was read.
func (m *Mirrors) PatchService(ctx context.Context, s Service) error {
	o := ownedObject{Metadata: at(s.Object), Spec: &ownedSpec{Ports: s.Ports}}
	return m.client.twins.patch(ctx, path.Join(servicesIn(s.Namespace), s.Name), o, new(object))
}

// PatchSlice changes the ports and endpoints of an EndpointSlice, if the slice has not changed since it was read.
func (m *Mirrors) PatchSlice(ctx context.Context, s Slice) error {
	return m.client.twins.patch(ctx, path.Join(endpointSlices(s.Namespace), s.Name), ownedSlice(s, at(s.Object)),
		new(object))
}

// DeleteService deletes a Service, if the Service has not changed since it was read.
func (m *Mirrors) DeleteService(ctx context.Context, s Service) error {
	return m.client.twins.delete(ctx, path.Join(servicesIn(s.Namespace), s.Name), s.Version)
}

// DeleteSlice deletes an EndpointSlice, if the slice has not changed since it was read.
func (m *Mirrors) DeleteSlice(ctx context.Context, s Slice) error {
	return m.client.twins.delete(ctx, path.Join(endpointSlices(s.Namespace), s.Name), s.Version)
}

// ListSlices asks the API server for the EndpointSlices with the label. View may still have an older state of them.
func (m *Mirrors) ListSlices(ctx context.Context) (all []Slice, err error) {
	var list sliceList
	if err = m.client.twins.list(ctx, endpointSlicesPath, m.selector(), &list); err != nil {
		return nil, fmt.Errorf("reading the EndpointSlices of twins: %w", err)
	}
	for i := range list.Items {
		if s, ok := sliceFrom(&list.Items[i]); ok {
			all = append(all, s)
		}
	}
	return all, nil
}

// ownedSlice returns the fields of an EndpointSlice that Mirrors writes.
func ownedSlice(s Slice, meta ownedMeta) ownedObject {
	o := ownedObject{Metadata: meta, Ports: s.Ports, Endpoints: []ownedEndpoint{}}
	for _, e := range s.Endpoints {
		o.Endpoints = append(o.Endpoints, ownedEndpoint{
			Addresses: []string{e.Address}, Conditions: map[string]bool{"ready": true}, NodeName: e.Node, Zone: e.Zone,
		})
	}
	return o
}

func servicesIn(namespace string) string {
	return path.Join("/api/v1/namespaces", namespace, "services")
}
